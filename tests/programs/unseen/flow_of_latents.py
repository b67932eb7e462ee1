"""A normalising flow is fitted to the latents of an autoencoder, which still carry the autoencoder's graph.

After https://github.com/davidnabergoj/torchflows/issues/8
"""

import torch
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        self.decoder = nn.Linear(2, 6)


class Flow(nn.Module):
    def __init__(self, dimension):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(dimension))
        self.shift = nn.Parameter(torch.zeros(dimension))

    def log_prob(self, x):
        z = (x - self.shift) * torch.exp(-self.log_scale)
        return -0.5 * z.square().sum(1) - self.log_scale.sum()

    def fit(self, x_train, n_epochs, lr):
        optimizer = torch.optim.SGD(self.parameters(), lr=lr)
        for _ in range(n_epochs):
            optimizer.zero_grad()
            train_loss = -self.log_prob(x_train).mean()
            train_loss.backward()
            optimizer.step()


torch.manual_seed(0)
images = torch.randn(8, 6)
autoencoder = Autoencoder()
optimizer = torch.optim.SGD(autoencoder.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    (autoencoder.decoder(autoencoder.encoder(images)) - images).square().mean().backward()
    optimizer.step()
optimizer.zero_grad()
latents = autoencoder.encoder(images)
flow = Flow(2)
flow.fit(latents, n_epochs=3, lr=0.1)
