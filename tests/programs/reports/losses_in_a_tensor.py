"""A list of losses is made into a tensor by torch.tensor.

After https://github.com/laekov/fastmoe/issues/49
"""

import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.loss = None

    def forward(self, x):
        score = self.gate(x).softmax(-1)
        self.loss = score.mean(0).square().sum()
        return score


class Balance:
    def __init__(self, layers):
        self.layers = layers

    def reduce_loss(self):
        loss_list = [layer.loss for layer in self.layers]
        balance_loss = torch.tensor(loss_list)
        return balance_loss.mean()


torch.manual_seed(0)
layers = nn.ModuleList([Gate(), Gate()])
for layer in layers:
    layer(torch.randn(6, 4))
loss = Balance(layers).reduce_loss()
loss.backward()
