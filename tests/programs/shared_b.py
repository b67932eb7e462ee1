"""d and e share b and c; the pass of d frees them."""

import torch
from torch.autograd import Variable

a = Variable(torch.rand(1, 4), requires_grad=True)
b = a**2
c = b * 2
d = c.mean()
e = c.sum()

d.backward()
e.backward()
