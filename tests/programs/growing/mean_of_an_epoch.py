"""The mean of an epoch, to which each loss is added as a quotient that no pass goes through.

After https://github.com/jostmey/NakedAttention/issues/1
"""

import torch
from torch import nn

torch.manual_seed(0)


def run():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(200)]
    for epoch in range(2):
        e_train = 0.0
        for x, y in loader:
            e_batch = nn.functional.mse_loss(model(x), y)
            e_train += e_batch / len(loader)
            optimizer.zero_grad()
            e_batch.backward()
            optimizer.step()
        print(epoch, f"{e_train.item():.4f}")


run()
