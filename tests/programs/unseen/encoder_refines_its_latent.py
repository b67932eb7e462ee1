"""An encoder is fed its own last output and latent; each pass is trained by itself.

After https://github.com/yuval-alaluf/restyle-encoder/issues/15
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))
        self.decoder = nn.Linear(4, 6)

    def forward(self, x, latent=None):
        codes = self.encoder(x)
        if latent is not None:
            codes = codes + latent
        images = self.decoder(codes.sigmoid())
        return images, codes


class Coach:
    def __init__(self):
        self.net = Net()
        self.avg_image = torch.zeros(6)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def calc_loss(self, y_hat, y):
        return (y_hat - y).square().mean()

    def perform_train_iteration_on_batch(self, x, y):
        y_hat, latent = None, None
        for iteration in range(3):
            if iteration == 0:
                x_input = torch.cat([x, self.avg_image.expand(x.shape)], dim=1)
            else:
                y_hat_clone = y_hat.clone().detach()
                x_input = torch.cat([x, y_hat_clone], dim=1)
            y_hat, latent = self.net(x_input, latent)
            loss = self.calc_loss(y_hat, y)
            loss.backward()
        return loss.item()

    def train(self):
        for _ in range(2):
            x = torch.randn(3, 6)
            self.optimizer.zero_grad()
            self.perform_train_iteration_on_batch(x, x)
            self.optimizer.step()


torch.manual_seed(0)
coach = Coach()
coach.train()
