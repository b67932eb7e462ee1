"""A VAE's optimiser steps before the loss of its discriminator is differentiated, which reaches the encoder.

After https://github.com/YannDubs/disentangling-vae/issues/62
"""

import torch
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        self.decoder = nn.Linear(2, 4)

    def forward(self, x):
        latent = self.encoder(x)
        return self.decoder(latent), latent


class FactorKLoss:
    def __init__(self, discriminator):
        self.discriminator = discriminator
        self.optimizer_d = torch.optim.SGD(discriminator.parameters(), lr=0.1)

    def call_optimize(self, data, model, optimizer):
        recon, latent_sample = model(data)
        d_z = self.discriminator(latent_sample)
        tc_loss = (d_z[:, 0] - d_z[:, 1]).mean()
        vae_loss = (recon - data).square().mean() + tc_loss
        d_z_perm = self.discriminator(latent_sample.detach().flip(0))
        zeros, ones = torch.zeros(len(data), dtype=torch.long), torch.ones(len(data), dtype=torch.long)
        d_tc_loss = nn.functional.cross_entropy(d_z, zeros) + nn.functional.cross_entropy(d_z_perm, ones)

        optimizer.zero_grad()
        vae_loss.backward(retain_graph=True)
        optimizer.step()
        self.optimizer_d.zero_grad()
        d_tc_loss.backward()
        self.optimizer_d.step()


torch.manual_seed(0)
model = VAE()
loss_f = FactorKLoss(nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss_f.call_optimize(torch.randn(3, 4), model, optimizer)
