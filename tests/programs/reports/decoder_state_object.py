"""A decoder's state lives in an object of its own: a tuple of hidden states, and the fed input.

After https://github.com/OpenNMT/OpenNMT-py/issues/403
"""

import torch
from torch import nn


class DecoderState:
    def __init__(self, hidden, input_feed):
        self.hidden = hidden
        self.input_feed = input_feed

    def update_state(self, hidden, input_feed):
        self.hidden = hidden
        self.input_feed = input_feed


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(6, 4)
        self.attend = nn.Linear(4, 4)

    def forward(self, words, state):
        outputs = []
        for word in words:
            hidden = self.cell(torch.cat([word, state.input_feed], 1), state.hidden)
            fed = self.attend(hidden[0]).tanh()
            outputs.append(fed)
            state.update_state(hidden, fed)
        return torch.stack(outputs)


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optim = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(self, batch, trunc_size):
        dec_state = DecoderState((torch.zeros(2, 4), torch.zeros(2, 4)), torch.zeros(2, 4))
        for j in range(0, batch.size(0), trunc_size):
            outputs = self.model(batch[j : j + trunc_size], dec_state)
            loss = outputs.square().sum()
            self.optim.zero_grad()
            loss.backward()
            self.optim.step()


torch.manual_seed(0)
trainer = Trainer(Decoder())
trainer.train(torch.randn(6, 2, 2), trunc_size=2)
