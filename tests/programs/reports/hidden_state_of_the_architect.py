"""An architecture search over a recurrent cell: the hidden state of the validation data goes through two methods.

After https://github.com/quark0/darts/issues/56
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(10, 5)
        self.decoder = nn.Linear(5, 3)
        self.arch = nn.Parameter(torch.zeros(2))

    def forward(self, x, hidden):
        for x_t in x:
            s = self.mixed(torch.cat([x_t, hidden], 1))
            probs = self.arch.softmax(0)
            hidden = probs[0] * s.tanh() + probs[1] * s.sigmoid()
        return self.decoder(hidden), hidden

    def loss(self, hidden, x, target):
        out, hidden_next = self(x, hidden)
        return nn.functional.cross_entropy(out, target), hidden_next


class Architect:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD([model.arch], lr=0.1)

    def step(self, hidden_valid, x, target):
        self.optimizer.zero_grad()
        hidden_valid = self.backward_step(hidden_valid, x, target)
        self.optimizer.step()
        return hidden_valid, None

    def backward_step(self, hidden, x, target):
        loss, hidden_next = self.model.loss(hidden, x, target)
        loss.backward()
        return hidden_next


def train(model, architect, optimizer, batches):
    hidden = torch.zeros(2, 5)
    hidden_valid = torch.zeros(2, 5)
    for x, y in batches:
        hidden = hidden.detach()
        hidden_valid, _ = architect.step(hidden_valid, x.flip(0), y)
        optimizer.zero_grad()
        out, hidden = model(x, hidden)
        nn.functional.cross_entropy(out, y).backward()
        optimizer.step()


torch.manual_seed(0)
model = Model()
weights = [*model.mixed.parameters(), *model.decoder.parameters()]
batches = [(torch.randn(4, 2, 5), torch.randint(0, 3, (2,))) for _ in range(3)]
train(model, Architect(model), torch.optim.SGD(weights, lr=0.1), batches)
