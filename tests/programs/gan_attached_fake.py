"""Both losses of a GAN go through the generator, as the fake is not detached for the discriminator's."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(2, 4), nn.Tanh())
discriminator = nn.Linear(4, 1)
g_step = torch.optim.SGD(generator.parameters(), lr=0.1)
d_step = torch.optim.SGD(discriminator.parameters(), lr=0.1)

for _ in range(2):
    fake = generator(torch.randn(8, 2))
    d_loss = discriminator(fake).mean() - discriminator(torch.randn(8, 4)).mean()
    d_step.zero_grad()
    d_loss.backward()
    d_step.step()

    g_loss = -discriminator(fake).mean()
    g_step.zero_grad()
    g_loss.backward()
    g_step.step()
