"""The loss at the climbed point is computed and thrown away; the old one is differentiated once more.

After https://github.com/kozistr/pytorch_optimizer/issues/64
"""

import torch
from torch import nn


class SAM(torch.optim.Optimizer):
    def __init__(self, params, lr, rho=0.05):
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                self.state[p]["e_w"] = p.grad * (group["rho"] / norm)
                p.add_(self.state[p]["e_w"])
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["e_w"])
                p.sub_(p.grad, alpha=group["lr"])
        if zero_grad:
            self.zero_grad()


def train_epoch(models, criterion, optimizers, loader):
    for inputs, labels in loader:
        loss = criterion(models["backbone"](inputs), labels)
        loss.backward(retain_graph=True)
        optimizers["backbone"].first_step(zero_grad=True)

        criterion(models["backbone"](inputs), labels)
        loss.backward()
        optimizers["backbone"].second_step()


torch.manual_seed(0)
models = {"backbone": nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))}
optimizers = {"backbone": SAM(models["backbone"].parameters(), lr=0.1)}
train_epoch(models, nn.CrossEntropyLoss(), optimizers, [(torch.randn(5, 4), torch.randint(0, 3, (5,)))])
