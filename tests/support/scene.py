"""A module with everything that a careless call could disturb, and what hangs on it."""

from typing import Any

import torch
from torch import Tensor, nn

D = torch.float64
X = torch.tensor([[0.3, -0.8, 1.4], [0.9, 0.2, -0.5]], dtype=D)


class Table(nn.Module):
    """Attributes of all kinds, parameters that are frozen or tied, buffers that move or are none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=D)
        self.norm = nn.BatchNorm1d(4, dtype=D)
        self.drop = nn.Dropout(0.4)
        self.still = nn.BatchNorm1d(4, dtype=D).eval()
        self.tied = self.inner
        self.frozen = nn.Parameter(torch.full((4,), 0.5, dtype=D), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2, dtype=D))
        self.register_buffer("data", torch.linspace(-1, 1.5, 12, dtype=D).reshape(3, 4).contiguous())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("nothing", None)
        self.note: Any = {"kept": [1, 2], "tensor": torch.ones(2)}

    def forward(self) -> Tensor:
        self.calls += 1
        rows = self.still(self.drop(self.norm(self.tied(self.inner(self.data)))))
        return (rows * self.frozen).tanh().mean() + 2


class Model(nn.Module):
    """Entry by entry in its argument, times a number that batch norm, dropout and the rest give.

    Attributes:
        fired: How often a hook fired that belongs to the training, and must not fire.
    """

    def __init__(self) -> None:
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.tensor([0.7, -1.2, 0.4], dtype=D))
        self.table = Table()
        torch.set_rng_state(state)
        self.fired: list[str] = []
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.25)
                parameter.register_hook(lambda grad, name=name: self.fired.append(name))
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.fired.append(name))
        self.table.register_forward_pre_hook(lambda module, args: None)
        self.table.register_forward_hook(lambda module, args, result: None)
        self.table.register_state_dict_post_hook(lambda *_: None)
        self.table.inner.register_forward_hook(lambda module, args, result: result * 1.0)
        self.table.drop.register_full_backward_hook(lambda module, inputs, outputs: None)

    def forward(self, z: Tensor) -> Tensor:
        return self.table() * self.scale * z.sin() * z
