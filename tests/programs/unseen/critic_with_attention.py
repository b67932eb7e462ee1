"""The gradient penalty of a critic that uses scaled dot product attention.

After https://github.com/pytorch/pytorch/issues/116350
"""

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        q, k, v = (t[:, None] for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v)[:, 0]


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.out = Attention(4), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.attention(x).mean(1))


def gradient_penalty(critic, x):
    x = x.requires_grad_()
    (g,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (g.flatten(1).norm(dim=1) - 1).square().mean()


torch.manual_seed(0)
critic = Critic()
optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
gp = gradient_penalty(critic, torch.randn(3, 6, 4))
optimizer.zero_grad()
gp.backward()
optimizer.step()
