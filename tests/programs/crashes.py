"""A program with an exception of its own."""

import sys

import torch


def divide(a):
    return a / 0


x = torch.rand(4, requires_grad=True)
x.sum().backward()
print(sys.argv[1:], file=sys.stderr)
divide(1)
