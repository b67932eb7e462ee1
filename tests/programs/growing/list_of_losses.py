"""A history of losses, of an object with methods."""

import torch
from torch import nn


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.history = {"loss": []}

    def step(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.history["loss"].append(loss)


trainer = Trainer()
for _ in range(25):
    trainer.step(torch.randn(8, 3), torch.randn(8, 1))
print(len(trainer.history["loss"]))
