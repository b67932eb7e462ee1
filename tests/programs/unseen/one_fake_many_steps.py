"""A single-image GAN makes several generator steps with one and the same fake image.

After https://github.com/tamarott/SinGAN/issues/148
"""

import torch
from torch import nn


def train_single_scale(netD, netG, real, Gsteps, Dsteps):
    optimizerD = torch.optim.SGD(netD.parameters(), lr=0.05)
    optimizerG = torch.optim.SGD(netG.parameters(), lr=0.05)
    for _ in range(2):
        for _ in range(Dsteps):
            noise = torch.randn(1, 1, 6, 6)
            netD.zero_grad()
            errD_real = -netD(real).mean()
            fake = netG(noise)
            errD_fake = netD(fake.detach()).mean()
            (errD_real + errD_fake).backward()
            optimizerD.step()
        for _ in range(Gsteps):
            netG.zero_grad()
            output = netD(fake)
            errG = -output.mean()
            errG.backward(retain_graph=True)
            optimizerG.step()


torch.manual_seed(0)
netD = nn.Sequential(nn.Conv2d(1, 2, 3), nn.LeakyReLU(0.2), nn.Conv2d(2, 1, 3))
netG = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(2, 1, 3, padding=1), nn.Tanh())
train_single_scale(netD, netG, torch.randn(1, 1, 6, 6), Gsteps=2, Dsteps=2)
