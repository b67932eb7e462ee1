"""c = a * b retained, then del b: backward still works, as the product saved b's value."""

import torch

a = torch.tensor(1.0, requires_grad=True)
b = torch.tensor(2.0, requires_grad=True)
c = a * b

for _ in range(5):
    print(c.backward(retain_graph=True))
    print(a.grad, b.grad)

del b
for _ in range(3):
    c.backward(retain_graph=True)
    print(a.grad)
