"""Both losses are computed together; the discriminator steps, and its pass has given the generator a gradient.

After https://github.com/ayu-22/BPPNet-Back-Projected-Pyramid-Network/issues/6
"""

import torch
from torch import nn


class Gen(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))

    def forward(self, x):
        return self.net(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.bn, self.c2 = nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 3, 2, 1)

    def forward(self, x):
        return self.c2(nn.functional.leaky_relu(self.bn(self.c1(x)), 0.2)).mean((1, 2, 3)).sigmoid()


class DUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen, self.disc = Gen(), Discriminator()
        self.gen_optimizer = torch.optim.Adam(self.gen.parameters(), lr=0.001)
        self.dis_optimizer = torch.optim.Adam(self.disc.parameters(), lr=0.001)
        self.l1, self.bce = nn.L1Loss(), nn.BCELoss()

    def process(self, haze_images, dehaze_images):
        self.gen_optimizer.zero_grad()
        self.dis_optimizer.zero_grad()
        outputs = self.gen(haze_images)
        dis_real = self.disc(dehaze_images)
        dis_fake = self.disc(outputs)
        dis_loss = (self.bce(dis_real, torch.ones_like(dis_real)) + self.bce(dis_fake, torch.zeros_like(dis_fake))) / 2
        gen_gan_loss = self.bce(dis_fake, torch.ones_like(dis_fake)) * 0.7
        gen_loss = gen_gan_loss + self.l1(outputs, dehaze_images)
        return gen_loss, dis_loss

    def backward(self, gen_loss, dis_loss):
        dis_loss.backward(retain_graph=True)
        self.dis_optimizer.step()
        gen_loss.backward()
        self.gen_optimizer.step()


def train(epochs):
    for epoch in range(epochs):
        for haze, clear in loader:
            gen_loss, dis_loss = net.process(haze, clear)
            net.backward(gen_loss, dis_loss)


torch.manual_seed(0)
net = DUNet()
loader = [(torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 8)) for _ in range(3)]
train(1)
