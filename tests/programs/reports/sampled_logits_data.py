"""The logits of a sampled sequence are stacked, and their .data goes on, through a maximum that gives two results.

After https://github.com/facebookresearch/inversecooking/issues/3
"""

import torch
from torch import nn


class DecoderTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.linear = nn.Embedding(6, 5), nn.Linear(5, 5), nn.Linear(5, 6)

    def forward(self, features, captions):
        x = torch.tanh(self.layer(self.embed(captions) + features.unsqueeze(1)))
        return self.linear(x), None

    def sample(self, features, steps=3, greedy=True):
        sampled_ids, logits = [], []
        token = torch.zeros(features.size(0), dtype=torch.long)
        for i in range(steps):
            outputs, _ = self.forward(features, token.unsqueeze(1))
            outputs = outputs.squeeze(1)
            logits.append(outputs)
            token = outputs.max(1)[1].detach()
            sampled_ids.append(token)
        sampled_ids = torch.stack(sampled_ids, 1)
        logits = torch.stack(logits, 1).data
        return sampled_ids, logits


class InverseCookingModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.image_encoder, self.ingredient_decoder = nn.Linear(4, 5), DecoderTransformer()
        self.crit = nn.BCELoss()

    def forward(self, img, target):
        ingr_ids, ingr_logits = self.ingredient_decoder.sample(self.image_encoder(img))
        ingr_logits = ingr_logits.softmax(-1)
        ingr_probs, _ = torch.max(ingr_logits, dim=1)
        return {"ingr_loss": self.crit(ingr_probs, target)}


torch.manual_seed(0)
model = InverseCookingModel()
optimizer = torch.optim.Adam(model.parameters())
for i in range(2):
    losses = model(torch.randn(3, 4), torch.randint(0, 2, (3, 6)).float())
    loss = 1000 * losses["ingr_loss"].mean()
    model.zero_grad()
    loss.backward()
    optimizer.step()
