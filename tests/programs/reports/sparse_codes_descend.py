"""Codes that require grad descend by `-=`.

After https://github.com/BaiTheBest/SparseLLM/issues/13
"""

import torch
from torch import nn


def optimise_codes(weight, target, s, chunks, s_learning_rate=0.1):
    for chunk in chunks:
        s_batch = s[:, chunk].clone().requires_grad_()
        for _ in range(2):
            loss_s = (weight @ s_batch - target[:, chunk]).square().sum()
            loss_s.backward()
            s_batch -= s_learning_rate * s_batch.grad
            s_batch.grad.zero_()
        s[:, chunk] = s_batch.detach()
    return s


torch.manual_seed(0)
weight, target, s = torch.randn(3, 3), torch.randn(3, 4), torch.zeros(3, 4)
codes = nn.Parameter(optimise_codes(weight, target, s, [slice(0, 2), slice(2, 4)]))
