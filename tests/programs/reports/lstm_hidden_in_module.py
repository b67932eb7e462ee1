"""An LSTM whose module keeps the pair of its states, and a function that trains it batch by batch.

After https://github.com/pytorch/pytorch/issues/2769
"""

import torch
from torch import nn


class LSTM(nn.Module):
    def __init__(self, input_len=3, hidden_len=4, target_size=2):
        super().__init__()
        self.hidden_len = hidden_len
        self.lstm = nn.LSTM(input_len, hidden_len, batch_first=True)
        self.hidden2class = nn.Linear(hidden_len, target_size)
        self.hidden = self.init_hidden()

    def init_hidden(self):
        return torch.zeros(1, 1, self.hidden_len), torch.zeros(1, 1, self.hidden_len)

    def forward(self, x):
        lstm_out, self.hidden = self.lstm(x, self.hidden)
        return self.hidden2class(lstm_out[:, -1, :]).log_softmax(-1)


def train(data, model, criterion, optimizer):
    for inputs, target in data:
        output = model(inputs)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


torch.manual_seed(0)
model = LSTM()
data = [(torch.randn(1, 5, 3), torch.tensor([i % 2])) for i in range(3)]
train(data, model, nn.NLLLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
