"""c is differentiated; then d and e are built from b and c, which can be computed, and not differentiated."""

import torch

a = torch.tensor(1.0, requires_grad=True)
b = a * torch.tensor(2)
c = b * torch.tensor(3)

c.backward()

d = b * torch.tensor(4)
e = c * torch.tensor(5)
print("d = ", d)
print("e = ", e)
d.backward()
