"""A threshold sets the unvoiced pitches to zero, in the tensor that the network's last operation saved.

After https://github.com/maxrmorrison/torchcrepe/issues/9
"""

import torch
from torch import nn


class At:
    def __init__(self, value):
        self.value = value

    def __call__(self, pitch, periodicity):
        pitch[periodicity < self.value] = 0.0
        return pitch


class Tracker(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 2)

    def forward(self, frames):
        bins, voiced = self.net(frames).unbind(-1)
        return torch.exp(0.1 * bins), voiced.sigmoid()


def pitch_loss(tracker, threshold, frames, truth):
    pitch, periodicity = tracker(frames)
    pitch = threshold(pitch, periodicity)
    return (pitch - truth).square().mean() + (periodicity - 0.5).square().mean()


torch.manual_seed(0)
tracker, threshold = Tracker(), At(0.5)
optimizer = torch.optim.SGD(tracker.parameters(), lr=0.1)
for _ in range(2):
    loss = pitch_loss(tracker, threshold, torch.randn(8, 6), torch.rand(8))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
