"""The encoder's loss still has the decoder's weights from before the decoder's step.

After https://github.com/hui-po-wang/Pytorch-VAE-GAN/issues/5
"""

import torch
from torch import nn


class Generator(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.encoder = nn.Linear(features, 2 * hidden)
        self.decoder = nn.Sequential(nn.Linear(hidden, 8), nn.Tanh(), nn.Linear(8, features))

    def forward(self, x):
        mean, logvar = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn(mean.shape, generator=torch.Generator().manual_seed(1)) * (0.5 * logvar).exp()
        return mean, logvar, self.decoder(code)


class Discriminator(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.lth_features = nn.Sequential(nn.Linear(features, 5), nn.LeakyReLU(0.2))
        self.sigmoid_output = nn.Sequential(nn.Linear(5, 1), nn.Sigmoid())

    def forward(self, x):
        return self.sigmoid_output(self.lth_features(x)).squeeze(1)

    def similarity(self, x):
        return self.lth_features(x)


torch.manual_seed(0)
beta, gamma = 5, 15
G, D = Generator(6, 3), Discriminator(6)
criterion = nn.BCELoss()
opt_enc = torch.optim.SGD(G.encoder.parameters(), lr=0.01)
opt_dec = torch.optim.SGD(G.decoder.parameters(), lr=0.01)
opt_dis = torch.optim.SGD(D.parameters(), lr=0.001)
for data in torch.randn(2, 4, 6):
    ones_label, zeros_label = torch.ones(4), torch.zeros(4)
    mean, logvar, rec_enc = G(data)

    # train discriminator
    dis_img_loss = criterion(D(data), ones_label) + criterion(D(rec_enc), zeros_label)
    opt_dis.zero_grad()
    dis_img_loss.backward(retain_graph=True)
    opt_dis.step()

    # train decoder
    dis_img_loss = criterion(D(data), ones_label) + criterion(D(rec_enc), zeros_label)
    rec_loss = ((D.similarity(rec_enc) - D.similarity(data)) ** 2).mean()
    err_dec = gamma * rec_loss - dis_img_loss
    opt_dec.zero_grad()
    err_dec.backward(retain_graph=True)
    opt_dec.step()

    # train encoder
    prior_loss = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).mean()
    err_enc = prior_loss + beta * rec_loss
    opt_enc.zero_grad()
    err_enc.backward()
    opt_enc.step()
