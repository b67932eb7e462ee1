"""Kernels are drawn while the network is trained; the drawing normalises them in place.

After https://github.com/pytorch/pytorch/issues/48149
"""

import torch
from torch import nn


def norm_ip(img, low, high):
    img.clamp_(min=low, max=high)
    img.sub_(low).div_(max(high - low, 1e-5))


def make_grid(tensor):
    for t in tensor:
        norm_ip(t, float(t.min()), float(t.max()))
    return torch.cat(list(tensor), dim=-1)


def kernels_of(model):
    grids = []
    for sub_module in model.modules():
        if isinstance(sub_module, nn.Conv2d):
            kernels = sub_module.weight
            for o_idx in range(kernels.shape[0]):
                kernel_idx = kernels[o_idx, :, :, :].unsqueeze(1)
                grids.append(make_grid(kernel_idx))
    return grids


torch.manual_seed(0)
alexnet = nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(alexnet.parameters(), lr=0.1)
for _ in range(2):
    loss = nn.functional.cross_entropy(alexnet(torch.randn(3, 2, 4, 4)), torch.tensor([0, 1, 1]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    drawn = len(kernels_of(alexnet))
