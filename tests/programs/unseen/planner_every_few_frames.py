"""A driving model is trained through a few frames at a time; its hidden state lives on from window to window.

After https://github.com/OpenDriveLab/Openpilot-Deepdive/issues/6
"""

import torch
from torch import nn


class SequencePlanningNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(6, 5)
        self.gru = nn.GRUCell(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x, hidden):
        features = self.backbone(x).relu()
        hidden = self.gru(features, hidden)
        trajectory = self.head(hidden)
        return trajectory, hidden


torch.manual_seed(0)
optimize_per_n_step = 4
model = SequencePlanningNetwork()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
frames, labels = torch.randn(12, 2, 6), torch.randn(12, 2, 3)
hidden = torch.zeros(2, 5)
total_loss = 0
for t in range(12):
    trajectory, hidden = model(frames[t], hidden)
    total_loss = total_loss + (trajectory - labels[t]).square().mean()
    if (t + 1) % optimize_per_n_step == 0:
        optimizer.zero_grad()
        total_loss.backward()
        optimizer.step()
        total_loss = 0
