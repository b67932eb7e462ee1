"""A data set embeds its texts once, with an embedding that nothing trains, and a loader hands them out.

After https://github.com/pyg-team/pytorch-frame/pull/229
"""

import torch
from torch import nn


class HashTextEmbedder:
    def __init__(self, out_channels, num_hash_bins=16):
        self.num_hash_bins = num_hash_bins
        self.embedding = nn.Embedding(num_hash_bins, out_channels)

    def __call__(self, sentences):
        idx = torch.LongTensor([sum(map(ord, s)) % self.num_hash_bins for s in sentences])
        return self.embedding(idx)


class TensorFrame:
    def __init__(self, feat, y):
        self.feat, self.y = feat, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return TensorFrame({k: v[index] for k, v in self.feat.items()}, self.y[index])


class Dataset:
    def __init__(self, sentences, y, embedder):
        self.sentences, self.y, self.embedder = sentences, y, embedder

    def materialize(self):
        self.tensor_frame = TensorFrame(
            {"text": self.embedder(self.sentences), "num": torch.randn(len(self.y), 2)}, self.y
        )
        return self


class DataLoader:
    def __init__(self, tf, batch_size):
        self.tf, self.batch_size = tf, batch_size

    def __iter__(self):
        for index in torch.randperm(len(self.tf)).split(self.batch_size):
            yield self.tf[index]


class FTTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.num, self.head = nn.Linear(4, 5), nn.Linear(2, 5), nn.Linear(5, 2)

    def forward(self, tf):
        return self.head((self.text(tf.feat["text"]) + self.num(tf.feat["num"])).relu())


torch.manual_seed(0)
sentences = [f"sentence number {i}" for i in range(12)]
dataset = Dataset(sentences, torch.randint(0, 2, (12,)), HashTextEmbedder(4)).materialize()
loader = DataLoader(dataset.tensor_frame, 4)
model = FTTransformer()
optimizer = torch.optim.Adam(model.parameters(), 0.01)


def train():
    model.train()
    for tf in loader:
        pred = model(tf)
        loss = nn.functional.cross_entropy(pred, tf.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


for epoch in range(2):
    train()
