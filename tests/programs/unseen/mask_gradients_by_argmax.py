"""How the edges of a predicted mask follow those of the image is computed from the classes, not from their scores.

After https://github.com/wonbeomjang/mobile-hair-segmentation-pytorch/issues/3
"""

import torch
from torch import nn


class ImageGradientLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("sobel", torch.tensor([[[[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]]]))

    def gradients(self, image):
        down = self.sobel.transpose(2, 3)
        return nn.functional.conv2d(image, self.sobel, padding=1), nn.functional.conv2d(image, down, padding=1)

    def forward(self, pred, gray_image):
        size = pred.size()
        pred = pred.argmax(1).view(size[0], 1, size[2], size[3]).float()
        image_x, image_y = self.gradients(gray_image)
        pred_x, pred_y = self.gradients(pred)
        magnitude = (pred_x**2 + pred_y**2 + 1e-6).sqrt()
        aligned = (pred_x * image_x + pred_y * image_y) / magnitude
        return (magnitude * (1 - aligned**2)).sum() / magnitude.sum()


torch.manual_seed(0)
net = nn.Conv2d(3, 2, 3, padding=1)
criterion = ImageGradientLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for image in torch.rand(2, 2, 3, 5, 5):
    loss = criterion(net(image), image.mean(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
