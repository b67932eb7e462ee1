"""One forward pass of a style generator gives two losses, which are differentiated one after the other.

After https://github.com/naver-ai/StyleMapGAN/issues/16
"""

import torch
from torch import nn


class DDPModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.mapping = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.e_ema = nn.Linear(6, 4)
        self.discriminator = nn.Linear(6, 1)

    def forward(self, batch):
        stylecode = self.mapping(torch.randn(batch, 3))
        fake_img = self.generator(stylecode)
        adv_loss = nn.functional.softplus(-self.discriminator(fake_img))
        w_rec_loss = (self.e_ema(fake_img) - stylecode).square()
        return adv_loss, w_rec_loss, stylecode


def train(model, g_optim, lambda_w_rec):
    adv_loss, w_rec_loss, stylecode = model(5)
    adv_loss = adv_loss.mean()
    w_rec_loss = w_rec_loss.mean()
    g_optim.zero_grad()
    adv_loss.backward()
    (w_rec_loss * lambda_w_rec).backward()
    g_optim.step()
    return stylecode.std().item()


torch.manual_seed(0)
model = DDPModel()
g_optim = torch.optim.SGD([*model.mapping.parameters(), *model.generator.parameters(), *model.e_ema.parameters()], 0.1)
for _ in range(2):
    train(model, g_optim, 0.5)
