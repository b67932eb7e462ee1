"""How evenly a codebook is used is counted from the nearest codes' indices, and that count is the loss.

After https://github.com/wds1996/GNPR-SID/issues/2
"""

import torch
from torch import nn


class VectorQuantizer(nn.Module):
    def __init__(self, n_e, e_dim):
        super().__init__()
        self.n_e = n_e
        self.embedding = nn.Embedding(n_e, e_dim)

    def assign(self, latent):
        distance = (latent[:, None] - self.embedding.weight).square().sum(-1)
        return (-distance).softmax(-1)

    def mean_count_loss(self, Q):
        indices = torch.argmax(Q, dim=-1)
        sample_counts = torch.bincount(indices.view(-1), minlength=self.n_e).float()
        mean_count = indices.size(0) / self.n_e
        return torch.mean((sample_counts - mean_count) ** 2) / (mean_count**2 + 1e-5)


torch.manual_seed(0)
encoder, quantizer = nn.Linear(4, 3), VectorQuantizer(5, 3)
optimizer = torch.optim.SGD([*encoder.parameters(), *quantizer.parameters()], lr=0.1)
for _ in range(2):
    Q = quantizer.assign(encoder(torch.randn(8, 4)))
    loss = quantizer.mean_count_loss(Q)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
