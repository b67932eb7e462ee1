"""A forward pass trains its estimator of mutual information, through the encoders, before it returns the loss.

After https://github.com/Linear95/CLUB/issues/4
"""

import torch
from torch import nn


class CLUB(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.p_mu = nn.Sequential(nn.Linear(dim, 5), nn.ReLU(), nn.Linear(5, dim))

    def learning_loss(self, x_samples, y_samples):
        return (self.p_mu(x_samples) - y_samples).square().sum(1).mean()

    def forward(self, x_samples, y_samples):
        mu = self.p_mu(x_samples)
        return ((y_samples.roll(1, 0) - mu).square() - (y_samples - mu).square()).sum(1).mean()


class Disentangled(nn.Module):
    def __init__(self):
        super().__init__()
        self.content, self.domain = nn.Linear(6, 3), nn.Linear(6, 3)
        self.classifier = nn.Linear(3, 2)
        self.club = CLUB(3)
        self.club_optimizer = torch.optim.SGD(self.club.parameters(), lr=0.1)

    def forward(self, x, labels):
        z_c, z_d = self.content(x).tanh(), self.domain(x).tanh()
        self.club_optimizer.zero_grad()
        self.club.learning_loss(z_c, z_d).backward()
        self.club_optimizer.step()
        return nn.functional.cross_entropy(self.classifier(z_c), labels) + 0.1 * self.club(z_c, z_d)


torch.manual_seed(0)
model = Disentangled()
main = [*model.content.parameters(), *model.domain.parameters(), *model.classifier.parameters()]
optimizer = torch.optim.SGD(main, lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 6), torch.randint(0, 2, (5,)))
    loss.backward()
    optimizer.step()
