"""A full backward hook on a model whose activation works in place.

After https://github.com/pytorch/pytorch/issues/61519
"""

import torch
from torch import nn

torch.manual_seed(0)
mod = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True))
gradients = []


def hook_g(module, input_grad, output_grad):
    gradients.append(output_grad[0].shape)


for m in mod:
    m.register_full_backward_hook(hook_g)
out = mod(torch.rand(1, 3, 4, 4))
out.sum().backward()
