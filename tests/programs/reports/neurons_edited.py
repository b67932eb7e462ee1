"""Columns of a trained weight are edited in place.

After https://github.com/Hunter-DDM/knowledge-neurons/issues/14
"""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 3)


def edit(layers, neurons, original, target, lambdas):
    for layer, pos in neurons:
        layers[layer].dense.weight[:, pos] -= original * lambdas[0]
        layers[layer].dense.weight[:, pos] += target * lambdas[1]


torch.manual_seed(0)
layers = nn.ModuleList([Layer(), Layer()])
edit(layers, [(0, 1), (1, 3)], torch.ones(3), torch.full((3,), 2.0), (0.5, 0.25))
loss = layers[1].dense(torch.ones(1, 4)).sum()
loss.backward()
