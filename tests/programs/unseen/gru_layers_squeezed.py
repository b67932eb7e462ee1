"""A quantisable GRU splits its first hidden state by layer and squeezes the parts in place.

After https://github.com/alibaba/TinyNeuralNetwork/issues/238
"""

import torch
from torch import nn


class GRULayer(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.cell = nn.GRUCell(inputs, hidden)

    def forward(self, x, hidden):
        outputs = []
        for step in x:
            hidden = self.cell(step, hidden)
            outputs.append(hidden)
        return torch.stack(outputs), hidden


class GRU(nn.Module):
    def __init__(self, inputs, hidden, num_layers):
        super().__init__()
        self.num_layers = num_layers
        self.layers = nn.ModuleList([GRULayer(hidden if i else inputs, hidden) for i in range(num_layers)])

    def forward(self, x, hidden):
        hx = hidden.split(1)
        hx = [hx[idx].squeeze_(0) for idx in range(self.num_layers)]
        for idx, layer in enumerate(self.layers):
            x, hx[idx] = layer(x, hx[idx])
        return x, torch.stack(hx)


class KeywordSpotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(3, 4)
        self.rnn = GRU(3, 4, 2)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        start = self.start(x.mean(0)).expand(2, -1, -1).clone()
        return self.out(self.rnn(x, start)[0][-1])


torch.manual_seed(0)
model = KeywordSpotter()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = nn.functional.cross_entropy(model(torch.randn(5, 2, 3)), torch.tensor([0, 1]))
loss.backward()
optimizer.step()
