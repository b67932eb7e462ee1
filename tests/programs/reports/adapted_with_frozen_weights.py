"""A learner adapts its parameters, of which one is frozen.

After https://github.com/learnables/learn2learn/issues/92
"""

import torch
from torch import nn


class HaarDownsampling(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.haar_weights = nn.Parameter(torch.randn(c, c))
        self.haar_weights.requires_grad = False

    def forward(self, x):
        return x @ self.haar_weights


class FreezeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(HaarDownsampling(4), nn.Linear(4, 4), nn.Tanh())
        self.final = nn.Linear(4, 3)

    def forward(self, x):
        return self.final(self.model(x))


def maml_update(params, lr, grads):
    return {n: p - lr * g for (n, p), g in zip(params.items(), grads)}


class MAML:
    def __init__(self, model, lr, first_order=False):
        self.module, self.lr, self.first_order = model, lr, first_order
        self.params = dict(model.named_parameters())

    def clone(self):
        new = MAML(self.module, self.lr, self.first_order)
        new.params = {n: p.clone() for n, p in self.params.items()}
        return new

    def adapt(self, loss):
        gradients = torch.autograd.grad(
            loss, list(self.params.values()), retain_graph=not self.first_order, create_graph=not self.first_order
        )
        self.params = maml_update(self.params, self.lr, gradients)

    def __call__(self, x):
        return torch.func.functional_call(self.module, self.params, x)


def main(model):
    maml = MAML(model, lr=0.1)
    opt = torch.optim.Adam(model.parameters(), 0.01)
    loss = nn.CrossEntropyLoss()
    for iteration in range(2):
        opt.zero_grad()
        for task in range(2):
            learner = maml.clone()
            x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
            learner.adapt(loss(learner(x[:3]), y[:3]))
            loss(learner(x[3:]), y[3:]).backward()
        opt.step()


torch.manual_seed(0)
model = FreezeNet()
main(model)
