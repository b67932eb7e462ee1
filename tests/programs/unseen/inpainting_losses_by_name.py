"""A trainer returns all losses in a dict; the discriminator steps between the two backward passes.

After https://github.com/daa233/generative-inpainting-pytorch/issues/38
"""

import torch
from torch import nn


class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.netG = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.localD = nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.2), nn.Linear(4, 1))
        self.globalD = nn.Sequential(nn.Linear(6, 4), nn.LeakyReLU(0.2), nn.Linear(4, 1))
        self.optimizer_g = torch.optim.SGD(self.netG.parameters(), lr=0.1)
        d_params = list(self.localD.parameters()) + list(self.globalD.parameters())
        self.optimizer_d = torch.optim.SGD(d_params, lr=0.1)

    def forward(self, x, ground_truth):
        losses = {}
        inpainted = self.netG(x)
        local_real, local_fake = self.localD(ground_truth[:, :3]), self.localD(inpainted[:, :3].detach())
        global_real, global_fake = self.globalD(ground_truth), self.globalD(inpainted.detach())
        losses["wgan_d"] = (local_fake - local_real).mean() + (global_fake - global_real).mean()
        losses["wgan_g"] = -self.localD(inpainted[:, :3]).mean() - self.globalD(inpainted).mean()
        losses["l1"] = (inpainted - ground_truth).abs().mean()
        return losses, inpainted


torch.manual_seed(0)
trainer = Trainer()
for _ in range(2):
    losses, inpainted = trainer(torch.randn(4, 6), torch.randn(4, 6))
    for k in losses:
        losses[k] = torch.mean(losses[k])
    trainer.optimizer_d.zero_grad()
    losses["d"] = losses["wgan_d"]
    losses["d"].backward()
    trainer.optimizer_d.step()
    trainer.optimizer_g.zero_grad()
    losses["g"] = losses["l1"] * 1.2 + losses["wgan_g"] * 0.01
    losses["g"].backward()
    trainer.optimizer_g.step()
