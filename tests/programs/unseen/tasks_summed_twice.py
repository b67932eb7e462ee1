"""The losses of the tasks at the second point are added to the sum that was differentiated at the first.

After https://github.com/davda54/sam/issues/10
"""

import torch
from torch import nn


class SAM:
    def __init__(self, parameters, rho, lr):
        self.parameters, self.rho, self.lr = list(parameters), rho, lr
        self.moved = []

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for p in self.parameters]).norm()
        self.moved = [p.grad * self.rho / norm for p in self.parameters]
        for p, e in zip(self.parameters, self.moved, strict=True):
            p.add_(e)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p, e in zip(self.parameters, self.moved, strict=True):
            p.sub_(e)
            p.sub_(self.lr * p.grad)


def get_loss(output, target, t):
    return nn.functional.cross_entropy(output[:, t], target[:, t])


torch.manual_seed(0)
num_tasks = 2
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3 * num_tasks), nn.Unflatten(1, (num_tasks, 3)))
optimizer = SAM(model.parameters(), rho=0.05, lr=0.1)
image, target = torch.randn(5, 4), torch.randint(0, 3, (5, num_tasks))

output = model(image)
loss = 0
for t in range(num_tasks):
    loss_t = get_loss(output, target, t)
    loss += loss_t
optimizer.zero_grad()
loss.backward()
optimizer.first_step()

output = model(image)
for t in range(num_tasks):
    loss_t = get_loss(output, target, t)
    loss += loss_t
loss.backward()
optimizer.second_step()
