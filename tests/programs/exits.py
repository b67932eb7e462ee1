"""A program with an exit status of its own, arguments, standard input and a working directory."""

import os
import sys

import torch

import __main__

x = torch.rand(4, requires_grad=True)
x.exp().sum().backward()
print(sys.argv, __name__, os.getcwd(), sys.stdin.read(), os.path.basename(__main__.__file__), sys.path[0])
sys.exit(7)
