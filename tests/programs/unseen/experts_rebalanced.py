"""A router changes its bias as it runs; the checkpoint, running it again, sends other tokens to the experts.

After https://github.com/pytorch/torchtitan/issues/1117
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class MoE(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList([nn.Linear(dim, dim) for _ in range(experts)])
        self.register_buffer("expert_bias", torch.zeros(experts))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        chosen = (scores + self.expert_bias).argmax(-1)
        tokens = torch.bincount(chosen, minlength=len(self.experts)).float()
        self.expert_bias = self.expert_bias + (tokens.mean() - tokens).sign()
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]).tanh() * scores[rows, i, None])
        return out


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(4), MoE(4, 3)

    def forward(self, x):
        return x + self.moe(self.norm(x))


torch.manual_seed(0)
layer = Layer()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
loss = checkpoint(layer, torch.randn(12, 4), use_reentrant=False).square().mean()
optimizer.zero_grad()
loss.backward()
optimizer.step()
