"""The data are brought into the network's shape by a convolution, once, before the training.

After https://github.com/lucidrains/denoising-diffusion-pytorch/issues/109
"""

import torch
from torch import nn


class GaussianDiffusion(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        noise = torch.randn_like(x)
        noisy = 0.8 * x + 0.6 * noise
        return (self.model(noisy) - noise).square().mean()


class Trainer:
    def __init__(self, diffusion, dataset, parameters):
        self.model, self.ds = diffusion, dataset
        self.opt = torch.optim.SGD(parameters, lr=0.1)

    def train(self, steps):
        for _ in range(steps):
            self.opt.zero_grad()
            loss = self.model(self.ds)
            loss.backward()
            self.opt.step()


torch.manual_seed(0)
series = torch.randn(4, 1, 8)
to_channels = nn.Conv1d(1, 3, 3, padding=1)
unet = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.SiLU(), nn.Conv1d(4, 3, 3, padding=1))
training_seq = to_channels(series).tanh()
trainer = Trainer(GaussianDiffusion(unet), training_seq, [*unet.parameters(), *to_channels.parameters()])
trainer.train(3)
