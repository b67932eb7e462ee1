"""The state of an RNN enters the next window, and the loss is made from its outputs.

After https://github.com/MorvanZhou/PyTorch-Tutorial/issues/57
"""

import torch
from torch import nn


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(1, 8, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, x, h_state):
        r_out, h_state = self.rnn(x, h_state)
        outs = [self.out(r_out[:, step, :]) for step in range(r_out.size(1))]
        return torch.stack(outs, dim=1), h_state


torch.manual_seed(0)
rnn = RNN()
optimizer = torch.optim.Adam(rnn.parameters(), lr=0.02)
loss_func = nn.MSELoss()

h_state = None
for step in range(3):
    steps = torch.linspace(step * 3.0, (step + 1) * 3.0, 5)
    x, y = steps.sin()[None, :, None], steps.cos()[None, :, None]
    prediction, h_state = rnn(x, h_state)
    loss = loss_func(prediction, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
