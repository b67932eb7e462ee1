"""The same, for e."""

import torch

a = torch.tensor(1.0, requires_grad=True)
b = a * torch.tensor(2)
c = b * torch.tensor(3)

c.backward()

e = c * torch.tensor(5)
e.backward()
