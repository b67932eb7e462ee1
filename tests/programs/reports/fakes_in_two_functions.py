"""Two functions compute the losses of a GAN; the fake lives in neither of them any more.

After https://github.com/Lornatang/ESRGAN-PyTorch/issues/5
"""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Linear(3, 4)
discriminator = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
d_optim = torch.optim.SGD(discriminator.parameters(), lr=0.1)
g_optim = torch.optim.SGD(generator.parameters(), lr=0.1)


def losses(lr, hr):
    sr = generator(lr).tanh()
    return discriminator(sr).mean() - discriminator(hr).mean(), (sr - hr).square().mean()


for step in range(2):
    d_loss, g_loss = losses(torch.randn(5, 3), torch.randn(5, 4))
    d_optim.zero_grad()
    d_loss.backward()
    d_optim.step()
    g_optim.zero_grad()
    g_loss.backward()
    g_optim.step()
