"""The example of a loss function is run on logits that were drawn, and require no gradient.

After https://github.com/abhuse/polyloss-pytorch/issues/4
"""

import torch
from torch import nn
from torch.nn import functional as F


class Poly1CrossEntropyLoss(nn.Module):
    def __init__(self, num_classes, epsilon=1.0):
        super().__init__()
        self.num_classes, self.epsilon = num_classes, epsilon

    def forward(self, logits, labels):
        onehot = F.one_hot(labels, self.num_classes).to(logits)
        pt = torch.sum(onehot * F.softmax(logits, dim=-1), dim=-1)
        ce = F.cross_entropy(logits, labels, reduction="none")
        return (ce + self.epsilon * (1 - pt)).mean()


torch.manual_seed(0)
batch_size, num_classes = 10, 5
logits = torch.rand([batch_size, num_classes])
labels = torch.randint(0, num_classes, [batch_size])
criterion = Poly1CrossEntropyLoss(num_classes)
loss = criterion(logits, labels)
loss.backward()
