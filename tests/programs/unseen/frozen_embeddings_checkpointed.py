"""The embeddings are frozen, and the layers above them are checkpointed.

After https://github.com/huggingface/transformers/issues/21381
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class BertLayer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, hidden_states):
        return hidden_states + self.dense(hidden_states).tanh()


class BertEncoder(nn.Module):
    def __init__(self, hidden, layers):
        super().__init__()
        self.layer = nn.ModuleList([BertLayer(hidden) for _ in range(layers)])
        self.gradient_checkpointing = True

    def forward(self, hidden_states):
        for layer_module in self.layer:
            if self.gradient_checkpointing and self.training:
                hidden_states = checkpoint(layer_module, hidden_states, use_reentrant=True)
            else:
                hidden_states = layer_module(hidden_states)
        return hidden_states


class BertModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(9, 4)
        self.encoder = BertEncoder(4, 2)

    def forward(self, input_ids):
        return self.encoder(self.embeddings(input_ids)).mean(1)


torch.manual_seed(0)
model = BertModel()
model.embeddings.requires_grad_(False)
optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.1)
for _ in range(2):
    output = model(torch.randint(0, 9, (2, 5)))
    loss = output.square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
