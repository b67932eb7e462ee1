"""The second derivative of a function is asked for, and the function happens to be a straight line.

After https://github.com/pytorch/pytorch/issues/32304
"""

import torch


def second_deriv(y, x):
    first = torch.autograd.grad(y, x, create_graph=True)[0]
    second = torch.autograd.grad(first, x, create_graph=True)[0]
    return second


def curvature_energy(functions, x):
    total = 0.0
    for f in functions:
        total = total + second_deriv(f(x), x)
    return total


x = torch.tensor(1.5, requires_grad=True)
functions = [lambda x: x**3, lambda x: x * 2]
energy = curvature_energy(functions, x)
energy.backward()
