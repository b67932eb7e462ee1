"""The perturbation is computed once; the generator that made it is trained for several steps on it.

After https://github.com/GiorgosKarantonis/Adversarial-Attacks-with-Relativistic-AdvGAN/issues/8
"""

import torch
from torch import nn


class AdvGAN:
    def __init__(self, target, n_steps_G):
        self.target, self.n_steps_G = target, n_steps_G
        self.G = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        self.optimizer_G = torch.optim.SGD(self.G.parameters(), lr=0.1)

    def train_batch(self, x, labels):
        perturbation = self.G(x)
        adv_images = torch.clamp(perturbation, -0.3, 0.3) + x
        adv_images = torch.clamp(adv_images, 0, 1)
        for _ in range(self.n_steps_G):
            self.optimizer_G.zero_grad()
            loss_perturb = perturbation.square().sum(1).sqrt().mean()
            loss_adv = -nn.functional.cross_entropy(self.target(adv_images), labels)
            loss_G = loss_adv + 0.1 * loss_perturb
            loss_G.backward(retain_graph=True)
            self.optimizer_G.step()
        return loss_G.item()


torch.manual_seed(0)
target = nn.Linear(6, 3).requires_grad_(False)
advgan = AdvGAN(target, n_steps_G=2)
for _ in range(2):
    advgan.train_batch(torch.rand(5, 6), torch.randint(0, 3, (5,)))
