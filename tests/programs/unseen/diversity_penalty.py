"""The generator's adversarial loss is differentiated, and then a diversity penalty on the same features.

After https://github.com/facebookresearch/pytorch_GAN_zoo/issues/83
"""

import torch
from torch import nn


class DNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        self.decision = nn.Linear(5, 1)

    def forward(self, x, get_feature=False):
        phi = self.features(x)
        return (self.decision(phi), phi) if get_feature else self.decision(phi)


def gdpp_loss(phi_fake, phi_real):
    def spectrum(phi):
        phi = nn.functional.normalize(phi, dim=1)
        return torch.linalg.eigvalsh(phi @ phi.T)

    return nn.functional.mse_loss(spectrum(phi_fake), spectrum(phi_real))


class BaseGAN:
    def __init__(self):
        self.netG, self.netD = nn.Sequential(nn.Linear(3, 6), nn.Tanh()), DNet()
        self.optimizerG = torch.optim.SGD(self.netG.parameters(), lr=0.1)

    def optimizeParameters(self, real_input):
        self.optimizerG.zero_grad()
        self.netD.zero_grad()
        with torch.no_grad():
            phiDReal = self.netD.features(real_input)
        predFakeG, phiGFake = self.netD(self.netG(torch.randn(len(real_input), 3)), True)
        lossGFake = nn.functional.softplus(-predFakeG).mean()
        lossGFake.backward()
        lossGDPP = gdpp_loss(phiGFake, phiDReal)
        lossGDPP.backward()
        self.optimizerG.step()


torch.manual_seed(0)
gan = BaseGAN()
for _ in range(2):
    gan.optimizeParameters(torch.randn(4, 6))
