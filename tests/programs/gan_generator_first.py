"""A GAN that trains its generator first, and reuses the fake for the discriminator."""

import torch

generator = torch.nn.Linear(2, 2)
critic = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer_g = torch.optim.SGD(generator.parameters(), lr=0.1)
optimizer_c = torch.optim.SGD(critic.parameters(), lr=0.1)
for _ in range(2):
    fake = generator(torch.randn(4, 2))
    g_loss = -critic(fake).mean()
    optimizer_g.zero_grad()
    g_loss.backward()
    optimizer_g.step()
    d_loss = critic(fake).mean() - critic(torch.randn(4, 2)).mean()
    optimizer_c.zero_grad()
    d_loss.backward()
    optimizer_c.step()
