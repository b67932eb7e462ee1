"""An optimiser puts full backward hooks on the layers; the activation that follows works in place.

After https://github.com/f-dangel/singd/issues/56
"""

import torch
from torch import nn


class SINGD(torch.optim.Optimizer):
    SUPPORTED_MODULES = (nn.Linear, nn.Conv2d)

    def __init__(self, model, lr):
        super().__init__(model.parameters(), {"lr": lr})
        self.scale = {}
        for module in model.modules():
            if isinstance(module, self.SUPPORTED_MODULES):
                module.register_full_backward_hook(self._save_grad_output)

    def _save_grad_output(self, module, grad_input, grad_output):
        self.scale[module] = grad_output[0].square().mean().item()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(18, 2))
optim = SINGD(model, lr=0.1)
for _ in range(2):
    output = model(torch.rand(2, 1, 5, 5))
    loss = nn.functional.cross_entropy(output, torch.tensor([0, 1]))
    optim.zero_grad()
    loss.backward()
    optim.step()
