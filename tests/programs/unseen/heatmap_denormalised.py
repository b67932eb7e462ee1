"""An image that is attacked is brought back to its range, channel by channel and in place.

After https://github.com/haofanwang/Score-CAM/issues/28
"""

import torch
from torch import nn


def denormalize(tensor):
    means, stds = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    denormalized = tensor.clone()
    for channel, mean, std in zip(denormalized[0], means, stds):
        channel.mul_(std).add_(mean)
    return denormalized


def objective(model, input_):
    shown = denormalize(input_)
    return model(input_).sum() + (shown - shown.clamp(0, 1)).square().sum()


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))
input_ = torch.randn(1, 3, 4, 4, requires_grad=True)
optimizer = torch.optim.SGD([input_], lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    objective(model, input_).backward()
    optimizer.step()
