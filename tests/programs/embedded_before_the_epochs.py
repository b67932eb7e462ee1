"""A table that is computed once, and looked up in every batch, while the embedding is trained."""

import torch
from torch.utils.data import DataLoader, TensorDataset

net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
emb = torch.nn.Embedding(10, 4)
opt = torch.optim.Adam(list(net.parameters()) + list(emb.parameters()))
data = DataLoader(TensorDataset(torch.randint(0, 10, (20,)), torch.randn(20, 1)), batch_size=5)
table = emb(torch.arange(10)).tanh()
for _ in range(2):
    for idx, y in data:
        pred = net(table[idx])
        loss = (pred - y).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
