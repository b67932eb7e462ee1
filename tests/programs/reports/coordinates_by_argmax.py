"""Coordinates are picked by argmax before the loss.

After https://github.com/LZGMatrix/BOP19_CDPN_2019ICCV/issues/4
"""

import torch
from torch import nn


class CDPN(nn.Module):
    def __init__(self, bins=6):
        super().__init__()
        self.coor_x, self.coor_y = nn.Linear(4, bins), nn.Linear(4, bins)

    def forward(self, x):
        return self.coor_x(x), self.coor_y(x)


def coordinates(output_coor_x, output_coor_y, bins=6):
    output_coor = torch.stack([torch.argmax(output_coor_x, axis=1), torch.argmax(output_coor_y, axis=1)], axis=1)
    return 2.0 * output_coor.float() / (bins - 1.0) - 1.0


torch.manual_seed(0)
model = CDPN()
x, y = model(torch.randn(5, 4))
loss = nn.functional.l1_loss(coordinates(x, y), torch.zeros(5, 2))
loss.backward()
