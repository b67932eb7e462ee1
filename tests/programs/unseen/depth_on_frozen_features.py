"""A depth head is trained on features that the backbone computes in inference mode.

After https://github.com/facebookresearch/dinov2/issues/472
"""

import torch
from torch import nn


class DepthEncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 5), nn.GELU())
        self.decode_head = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))

    @torch.inference_mode()
    def extract_feat(self, img):
        return self.backbone(img)

    def forward(self, img, depth_gt):
        x = self.extract_feat(img)
        depth = self.decode_head(x)
        return {"loss_depth": (depth - depth_gt).abs().mean()}


torch.manual_seed(0)
model = DepthEncoderDecoder()
optimizer = torch.optim.SGD(model.decode_head.parameters(), lr=0.1)
for _ in range(2):
    losses = model(torch.randn(4, 6), torch.rand(4, 1))
    optimizer.zero_grad()
    sum(losses.values()).backward()
    optimizer.step()
