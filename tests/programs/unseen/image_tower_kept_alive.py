"""The embeddings of a text-only batch, made a leaf that requires grad, get the image tower's output times zero.

After https://github.com/modelscope/ms-swift/issues/4613
"""

import torch
from torch import nn


class VisionLanguage(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(9, 4).requires_grad_(False)
        self.visual = nn.Linear(5, 4)
        self.layer = nn.Linear(4, 9)

    def forward(self, inputs_embeds):
        return self.layer(inputs_embeds.tanh())


class Template:
    def post_encode(self, model, inputs):
        inputs_embeds = model.embed_tokens(inputs["input_ids"]).requires_grad_()
        image_embeds = model.visual(torch.zeros(1, 5))
        inputs_embeds += image_embeds.mean() * 0.0
        return inputs_embeds


torch.manual_seed(0)
model = VisionLanguage()
template = Template()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
batch = {"input_ids": torch.randint(0, 9, (2, 5)), "labels": torch.randint(0, 9, (2, 5))}
logits = model(template.post_encode(model, batch))
loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
optimizer.zero_grad()
loss.backward()
optimizer.step()
