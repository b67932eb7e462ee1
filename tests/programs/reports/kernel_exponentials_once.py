"""The parameters of a kernel are exponentials that are taken once, when it is made.

After https://github.com/IceLab-X/MiniGP/issues/13
"""

import torch


class ARDKernel(torch.nn.Module):
    def __init__(self, input_dim):
        super().__init__()
        self.log_length = torch.nn.Parameter(torch.zeros(input_dim))
        self.log_signal = torch.nn.Parameter(torch.zeros(1))
        self.length_scales = torch.exp(self.log_length)
        self.signal_variance = torch.exp(self.log_signal)

    def forward(self, x1, x2):
        d = (x1 / self.length_scales).unsqueeze(1) - (x2 / self.length_scales).unsqueeze(0)
        return self.signal_variance * torch.exp(-0.5 * d.square().sum(-1))


class STGP(torch.nn.Module):
    def __init__(self, kernel, noise):
        super().__init__()
        self.kernel = kernel
        self.log_noise = torch.nn.Parameter(torch.tensor(noise).log())

    def negative_log_likelihood(self, X, Y):
        K = self.kernel(X, X) + torch.exp(self.log_noise) * torch.eye(len(X))
        L = torch.linalg.cholesky(K)
        g = torch.linalg.solve_triangular(L, Y, upper=False)
        return 0.5 * (g**2).sum() + L.diag().log().sum()

    def train_adam(self, X, Y, niteration=3, lr=0.1):
        optimizer = torch.optim.Adam(self.parameters(), lr=lr)
        for i in range(niteration):
            optimizer.zero_grad()
            loss = self.negative_log_likelihood(X, Y)
            loss.backward()
            optimizer.step()
            print("loss_nll:", loss.item())


torch.manual_seed(0)
X = torch.rand(8, 2)
Y = torch.sin(X.sum(1, keepdim=True))
model = STGP(ARDKernel(2), 0.1)
model.train_adam(X, Y)
