"""A word language model goes on from its last states, LSTM's tuple, without cutting them.

After https://github.com/yunjey/pytorch-tutorial/issues/90
"""

import torch
from torch import nn


class RNNLM(nn.Module):
    def __init__(self, vocab, embed, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, embed)
        self.lstm = nn.LSTM(embed, hidden, batch_first=True)
        self.linear = nn.Linear(hidden, vocab)

    def forward(self, x, h):
        x = self.embed(x)
        out, (h, c) = self.lstm(x, h)
        out = out.reshape(out.size(0) * out.size(1), out.size(2))
        return self.linear(out), (h, c)


torch.manual_seed(0)
seq_length = 5
ids = torch.randint(0, 12, (2, 31))
model = RNNLM(12, 4, 6)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    states = (torch.zeros(1, 2, 6), torch.zeros(1, 2, 6))
    for i in range(0, ids.size(1) - seq_length, seq_length):
        inputs = ids[:, i : i + seq_length]
        targets = ids[:, i + 1 : i + 1 + seq_length]
        outputs, states = model(inputs, states)
        loss = criterion(outputs, targets.reshape(-1))
        model.zero_grad()
        loss.backward()
        optimizer.step()
