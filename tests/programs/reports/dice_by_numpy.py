"""A loss is computed in NumPy.

After https://github.com/kevinzakka/pytorch-goodies/issues/11
"""

import numpy as np
import torch
from torch import nn


class DiceLoss(nn.Module):
    def forward(self, logits, true):
        probas = logits.sigmoid()
        intersection = np.sum((probas * true).detach().numpy())
        cardinality = np.sum((probas + true).detach().numpy())
        return torch.as_tensor(1 - 2.0 * intersection / (cardinality + 1e-7))


torch.manual_seed(0)
model, criterion = nn.Linear(3, 1), DiceLoss()
loss = criterion(model(torch.randn(6, 3)), torch.ones(6, 1))
loss.backward()
