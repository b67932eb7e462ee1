"""A spiking residual backbone: each neuron has a potential `v`, and `reset_net` is not called after the pass.

After https://github.com/fangwei123456/Spike-Element-Wise-ResNet/issues/19
"""

import torch
from torch import nn


class Neuron(nn.Module):
    def __init__(self):
        super().__init__()
        self.v = 0.0

    def forward(self, x):
        self.v = self.v + (x - self.v) / 2.0
        spike = torch.sigmoid(4.0 * (self.v - 1.0))
        self.v = (1.0 - spike) * self.v
        return spike


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Linear(width, width)
        self.neuron = Neuron()

    def forward(self, x):
        return x + self.neuron(self.conv(x))


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = Block(4)
        self.layer2 = Block(4)

    def forward(self, x):
        return self.layer2(self.layer1(x))


def fit_one_epoch(model_train, optimizer, batches):
    for images in batches:
        optimizer.zero_grad()
        outputs = model_train(images)
        loss = outputs.square().mean()
        loss.backward()
        optimizer.step()


torch.manual_seed(0)
backbone = Backbone()
fit_one_epoch(backbone, torch.optim.SGD(backbone.parameters(), lr=0.1), [torch.randn(2, 4) for _ in range(3)])
