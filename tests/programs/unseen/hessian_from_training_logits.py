"""A second-order optimiser's estimate of the Hessian reuses the logits of the training step.

After https://github.com/Liuhong99/Sophia/issues/1
"""

import torch
from torch import nn
from torch.nn import functional as F


class SophiaG(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def update_hessian(self):
        for group in self.param_groups:
            for p in group["params"]:
                hessian = self.state[p].setdefault("hessian", torch.zeros_like(p))
                hessian.mul_(group["beta"]).addcmul_(p.grad, p.grad, value=1 - group["beta"])

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                scale = self.state[p].get("hessian", torch.zeros_like(p)) + 1.0
                p.addcdiv_(p.grad, scale, value=-group["lr"])


class Multimodal(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.image = nn.Linear(4, 5), nn.Linear(3, 5)
        self.head = nn.Linear(5, 6)

    def forward(self, text, image):
        return self.head((self.text(text) + self.image(image)).tanh())


def train(model, optimizer, batches, k):
    for step, (text, image, Y) in enumerate(batches):
        logits = model(text, image)
        loss = F.cross_entropy(logits, Y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % k == 0:
            optimizer.zero_grad(set_to_none=True)
            samp_dist = torch.distributions.Categorical(logits=logits)
            y_sample = samp_dist.sample()
            loss_sampled = F.cross_entropy(logits, y_sample)
            loss_sampled.backward()
            optimizer.update_hessian()


torch.manual_seed(0)
batches = [(torch.randn(4, 4), torch.randn(4, 3), torch.randint(0, 6, (4,))) for _ in range(2)]
model = Multimodal()
optimizer = SophiaG(model.parameters(), lr=0.1)
train(model, optimizer, batches, k=1)
