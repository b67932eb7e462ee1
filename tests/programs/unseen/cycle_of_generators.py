"""Both generators' loss is differentiated after the discriminators that judged their images have stepped.

After https://github.com/cy-xu/simple_CycleGAN/issues/3
"""

import itertools

import torch
from torch import nn


def make_generator():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))


def make_discriminator():
    return nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1))


class CycleGAN:
    def __init__(self):
        self.G_AB, self.G_BA = make_generator(), make_generator()
        self.D_A, self.D_B = make_discriminator(), make_discriminator()
        self.optimizer_G = torch.optim.SGD(itertools.chain(self.G_AB.parameters(), self.G_BA.parameters()), lr=0.05)
        self.optimizer_D = torch.optim.SGD(itertools.chain(self.D_A.parameters(), self.D_B.parameters()), lr=0.05)

    def train_step(self, real_A, real_B):
        fake_B, fake_A = self.G_AB(real_A), self.G_BA(real_B)
        cycle = (self.G_BA(fake_B) - real_A).abs().mean() + (self.G_AB(fake_A) - real_B).abs().mean()
        loss_G = (self.D_A(fake_A) - 1).square().mean() + (self.D_B(fake_B) - 1).square().mean() + cycle

        self.optimizer_D.zero_grad()
        loss_A = (self.D_A(real_A) - 1).square().mean() + self.D_A(fake_A.detach()).square().mean()
        loss_B = (self.D_B(real_B) - 1).square().mean() + self.D_B(fake_B.detach()).square().mean()
        (loss_A + loss_B).backward()
        self.optimizer_D.step()

        self.optimizer_G.zero_grad()
        loss_G.backward()
        self.optimizer_G.step()


torch.manual_seed(0)
gan = CycleGAN()
for _ in range(2):
    gan.train_step(torch.randn(3, 5), torch.randn(3, 5))
