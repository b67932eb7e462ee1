"""The discriminator's step is made before the generator's loss, computed with it, is differentiated.

After https://github.com/knazeri/edge-connect/issues/152
"""

import torch
from torch import nn


class EdgeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.Sigmoid())
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid())
        self.gen_optimizer = torch.optim.SGD(self.generator.parameters(), lr=0.1)
        self.dis_optimizer = torch.optim.SGD(self.discriminator.parameters(), lr=0.1)

    def process(self, images, edges):
        self.gen_optimizer.zero_grad()
        self.dis_optimizer.zero_grad()
        outputs = self.generator(images)
        dis_real = self.discriminator(edges)
        dis_fake = self.discriminator(outputs.detach())
        dis_loss = -(dis_real.log().mean() + (1 - dis_fake).log().mean())
        gen_fake = self.discriminator(outputs)
        gen_loss = -gen_fake.log().mean() + (outputs - edges).abs().mean()
        return outputs, gen_loss, dis_loss

    def backward(self, gen_loss=None, dis_loss=None):
        if dis_loss is not None:
            dis_loss.backward()
        self.dis_optimizer.step()
        if gen_loss is not None:
            gen_loss.backward()
        self.gen_optimizer.step()


torch.manual_seed(0)
edge_model = EdgeModel()
for _ in range(2):
    outputs, gen_loss, dis_loss = edge_model.process(torch.rand(4, 6), torch.rand(4, 6))
    edge_model.backward(gen_loss, dis_loss)
