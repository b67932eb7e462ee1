"""The states of spiking layers are set to zero in place between two batches, and keep the graph of the first.

After https://github.com/synsense/sinabs/issues/5
"""

import torch
from torch import nn


class StatefulLayer(nn.Module):
    def __init__(self, features, alpha):
        super().__init__()
        self.alpha = alpha
        self.register_buffer("v_mem", torch.zeros(features))

    def forward(self, data):
        outputs = []
        for step in data:
            self.v_mem = self.alpha * self.v_mem + step
            outputs.append(torch.sigmoid(4 * (self.v_mem - 1)))
        return torch.stack(outputs)

    def reset_states(self):
        for buffer in self.buffers():
            buffer.zero_()


torch.manual_seed(0)
weights = nn.Linear(5, 3)
layer = StatefulLayer(3, alpha=0.9)
optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
for data in torch.rand(2, 6, 5):
    layer.reset_states()
    spikes = layer(weights(data))
    loss = (spikes.sum(0) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
