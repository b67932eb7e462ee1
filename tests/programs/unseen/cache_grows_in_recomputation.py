"""A decoder layer appends its keys to a cache; the checkpoint, running it again, appends them a second time.

After https://github.com/pytorch/pytorch/issues/155171
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class DynamicCache:
    def __init__(self):
        self.key_cache = {}

    def update(self, keys, layer_idx):
        if layer_idx in self.key_cache:
            self.key_cache[layer_idx] = torch.cat([self.key_cache[layer_idx], keys], dim=1)
        else:
            self.key_cache[layer_idx] = keys
        return self.key_cache[layer_idx]


class DecoderLayer(nn.Module):
    def __init__(self, dim, layer_idx):
        super().__init__()
        self.q, self.k, self.layer_idx = nn.Linear(dim, dim), nn.Linear(dim, dim), layer_idx

    def forward(self, hidden, past_key_values):
        keys = self.k(hidden)
        if past_key_values is not None:
            keys = past_key_values.update(keys, self.layer_idx)
        attention = (self.q(hidden) @ keys.transpose(1, 2)).softmax(-1)
        return hidden + attention @ keys


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(4, i) for i in range(2)])

    def forward(self, hidden, use_cache=True):
        past_key_values = DynamicCache() if use_cache else None
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, past_key_values, use_reentrant=False)
        return hidden


torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.randn(2, 5, 4)).square().mean()
optimizer.zero_grad()
loss.backward()
optimizer.step()
