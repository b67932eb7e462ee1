"""Lists and states that grow for a while, and are then differentiated as a whole; and inner steps of MAML."""

import torch
from torch import nn

torch.manual_seed(0)
cell = nn.RNNCell(2, 4)
optimizer = torch.optim.Adam(cell.parameters())
for _ in range(4):
    h, states = torch.zeros(1, 4), []
    for _ in range(120):
        h = cell(torch.randn(1, 2), h)
        states.append(h)
    loss = torch.stack(states).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

rate = torch.tensor(0.1, requires_grad=True)
for _ in range(3):
    w = torch.ones(3, requires_grad=True)
    for _ in range(40):
        (g,) = torch.autograd.grad((w**2).sum(), w, create_graph=True)
        w = w - rate * g
    w.square().sum().backward()

weights = [torch.ones(3, requires_grad=True) for _ in range(40)]
losses = [w.exp().sum() for w in weights]
for loss in losses:  # made before: nothing is added
    (2 * loss).backward()
x = torch.randn(40, 3)
outputs = nn.Linear(3, 1)(x).tanh()
for output in outputs:
    torch.autograd.grad(output.sum(), outputs, retain_graph=True)
print(f"{loss.item():.3f}")
