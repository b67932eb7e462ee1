"""The inner loop adapts the weights, but the second inner loss is computed with the first ones.

After https://github.com/tristandeleu/pytorch-meta/issues/91
"""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F


class MetaModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(4, 5)
        self.classifier = nn.Linear(5, 3)

    def forward(self, inputs, params=None):
        params = OrderedDict(self.named_parameters()) if params is None else params
        hidden = F.linear(inputs, params["features.weight"], params["features.bias"]).relu()
        return F.linear(hidden, params["classifier.weight"], params["classifier.bias"])


def gradient_update_parameters(model, loss, params=None, step_size=0.5):
    if params is None:
        params = OrderedDict(model.named_parameters())
    grads = torch.autograd.grad(loss, params.values(), create_graph=True)
    return OrderedDict((name, param - step_size * grad) for (name, param), grad in zip(params.items(), grads))


torch.manual_seed(0)
model = MetaModel()
meta_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
num_steps = 2
train_inputs, train_targets = torch.randn(6, 4), torch.randint(0, 3, (6,))
test_inputs, test_targets = torch.randn(6, 4), torch.randint(0, 3, (6,))
params = None
for _ in range(num_steps):
    train_logit = model(train_inputs)
    inner_loss = F.cross_entropy(train_logit, train_targets)
    params = gradient_update_parameters(model, inner_loss, params=params)
outer_loss = F.cross_entropy(model(test_inputs, params=params), test_targets)
meta_optimizer.zero_grad()
outer_loss.backward()
meta_optimizer.step()
