"""A gradient penalty is taken at points whose fakes were not detached; the generator's pass then meets a freed graph.

After https://github.com/junyanz/pytorch-CycleGAN-and-pix2pix/issues/439
"""

import torch
from torch import nn


def cal_gradient_penalty(netD, real, fake):
    alpha = torch.rand(real.shape[0], 1)
    interpolates = alpha * real + (1 - alpha) * fake
    interpolates.requires_grad_(True)
    out = netD(interpolates)
    gradients = torch.autograd.grad(out, interpolates, torch.ones_like(out), create_graph=True)[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


class Pix2PixModel:
    def __init__(self):
        self.netG = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
        self.netD = nn.Sequential(nn.Linear(2, 6), nn.Softplus(), nn.Linear(6, 1))
        self.optimizer_G = torch.optim.SGD(self.netG.parameters(), lr=0.1)
        self.optimizer_D = torch.optim.SGD(self.netD.parameters(), lr=0.1)

    def forward(self, real_A, real_B):
        self.real_B = real_B
        self.fake_B = self.netG(real_A)

    def backward_D(self):
        loss_D_fake = self.netD(self.fake_B.detach()).mean()
        loss_D_real = -self.netD(self.real_B).mean()
        penalty = cal_gradient_penalty(self.netD, self.real_B, self.fake_B)
        self.loss_D = loss_D_fake + loss_D_real + penalty
        self.loss_D.backward()

    def backward_G(self):
        self.loss_G = -self.netD(self.fake_B).mean()
        self.loss_G.backward()

    def optimize_parameters(self):
        self.optimizer_D.zero_grad()
        self.backward_D()
        self.optimizer_D.step()
        self.optimizer_G.zero_grad()
        self.backward_G()
        self.optimizer_G.step()


torch.manual_seed(0)
model = Pix2PixModel()
for _ in range(3):
    model.forward(torch.randn(4, 2), torch.randn(4, 2))
    model.optimize_parameters()
