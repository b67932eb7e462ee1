"""Sines and cosines are written into an embedding's weight, which is frozen only after that.

After https://github.com/Atcold/NYU-DLSP20/issues/765
"""

import torch
from torch import nn


def create_sinusoidal_embeddings(nb_p, dim, E):
    position = torch.arange(nb_p)[:, None]
    theta = position / 10000 ** (2 * (torch.arange(dim) // 2) / dim)
    E[:, 0::2] = theta[:, 0::2].sin()
    E[:, 1::2] = theta[:, 1::2].cos()
    E.requires_grad = False


class TransformerClassifier(nn.Module):
    def __init__(self, vocab, d_model):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, d_model)
        self.position_embeddings = nn.Embedding(6, d_model)
        create_sinusoidal_embeddings(6, d_model, self.position_embeddings.weight)
        self.final_layer = nn.Linear(d_model, 2)

    def forward(self, ids):
        positions = torch.arange(ids.size(1)).expand(ids.shape)
        return self.final_layer((self.word_embeddings(ids) + self.position_embeddings(positions)).tanh().mean(1))


torch.manual_seed(0)
model = TransformerClassifier(9, 4)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
loss = nn.functional.cross_entropy(model(torch.randint(0, 9, (3, 6))), torch.tensor([0, 1, 1]))
loss.backward()
optimizer.step()
