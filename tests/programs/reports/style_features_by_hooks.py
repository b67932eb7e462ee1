"""The features of a style image are saved by a hook, with their graph, before the optimiser's closure runs.

After https://github.com/fastai/fastai/pull/761
"""

import torch
from torch import nn


class SaveFeatures:
    features = None

    def __init__(self, module):
        self.hook = module.register_forward_hook(self.hook_fn)

    def hook_fn(self, module, inputs, output):
        self.features = output


torch.manual_seed(0)
vgg = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh())
sfs = [SaveFeatures(vgg[index]) for index in (1, 3)]
style_img = torch.randn(3, 4)
opt_img = torch.randn(3, 4, requires_grad=True)


def gram(x):
    return x.T @ x / x.numel()


vgg(style_img)
targ_styles = [gram(sf.features) for sf in sfs]
optimizer = torch.optim.LBFGS([opt_img], max_iter=3)


def step(loss_fn):
    optimizer.zero_grad()
    loss = loss_fn(opt_img)
    loss.backward()
    return loss


def style_loss(x):
    vgg(x)
    outs = [sf.features for sf in sfs]
    return sum((gram(o) - t).square().sum() for o, t in zip(outs, targ_styles))


optimizer.step(lambda: step(style_loss))
