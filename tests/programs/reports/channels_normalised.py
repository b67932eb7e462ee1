"""An image is normalised channel by channel, in place, while iterating over it.

After https://github.com/paarthneekhara/AdversarialDeepFakes/issues/23
"""

import torch
from torch import nn


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = mean, std

    def __call__(self, tensor):
        for t, m, s in zip(tensor, self.mean, self.std):
            t.sub_(m).div_(s)
        return tensor


def robust_fgsm(image, model, normalize, eps):
    adv = image.clone().requires_grad_()
    logits = model(normalize(adv * 1.0)[None])
    loss = nn.functional.cross_entropy(logits, torch.tensor([1]))
    loss.backward()
    return adv + eps * adv.grad.sign()


torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
perturbed = nn.Parameter(robust_fgsm(torch.rand(3, 2, 2), model, Normalize([0.5] * 3, [0.2] * 3), 0.1).detach())
