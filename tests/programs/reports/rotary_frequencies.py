"""A rotary embedding caches what it computes from learned frequencies.

After https://github.com/lucidrains/rotary-embedding-torch/issues/18
"""

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.freqs = nn.Parameter(torch.rand(dim))
        self.cached_freqs = None

    def forward(self, t):
        if self.cached_freqs is not None and self.cached_freqs.shape[0] >= t.shape[0]:
            return self.cached_freqs[: t.shape[0]]
        freqs = torch.einsum("i,j->ij", t, self.freqs)
        self.cached_freqs = freqs
        return freqs

    def rotate(self, q):
        freqs = self.forward(torch.arange(q.shape[0], dtype=q.dtype))
        return q * freqs.cos() + q.flip(-1) * freqs.sin()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q = nn.Linear(4, 4)
        self.rotary = RotaryEmbedding(4)

    def forward(self, x):
        return self.rotary.rotate(self.to_q(x))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(5, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
