"""A Function's backward looks at its saved tensors to see whether there are any, and then takes them.

After https://github.com/state-spaces/mamba/pull/1021
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class _Mamba3Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, decay):
        ctx.save_for_backward(x, decay)
        return x * decay.exp()

    @staticmethod
    def backward(ctx, dout):
        if len(ctx.saved_tensors) == 0:
            raise RuntimeError("the state was freed")
        x, decay = ctx.saved_tensors
        return dout * decay.exp(), (dout * x * decay.exp()).sum(0)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.decay = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return _Mamba3Function.apply(self.proj(x).tanh(), self.decay)


torch.manual_seed(0)
mixer = Mixer()
optimizer = torch.optim.SGD(mixer.parameters(), lr=0.1)
for _ in range(2):
    loss = checkpoint(mixer, torch.randn(3, 4), use_reentrant=False).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
