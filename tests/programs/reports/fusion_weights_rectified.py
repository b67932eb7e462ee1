"""The learned weights of a fusion go through an in-place ReLU.

After https://github.com/zylo117/Yet-Another-EfficientDet-Pytorch/issues/503
"""

import torch
from torch import nn


class FuseFeature(nn.Module):
    def __init__(self, e=1e-4):
        super().__init__()
        self.e = e
        self.weight = nn.Parameter(torch.ones(2))
        self.weight_relu = nn.ReLU(inplace=True)

    def forward(self, x):
        weight = self.weight_relu(self.weight)
        weight = weight / (torch.sum(weight, dim=0) + self.e)
        return nn.functional.silu(weight[0] * x[0] + weight[1] * x[1])


torch.manual_seed(0)
fuse = FuseFeature()
loss = fuse([torch.randn(2, 3), torch.randn(2, 3)]).mean()
loss.backward()
