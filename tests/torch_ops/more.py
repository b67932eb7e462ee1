"""Operations with a history of wrong second derivatives that PyTorch's database lacks."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D = torch.float64
Problems = Iterator[tuple[Any, ...]]  # a function, its point, and how PyTorch defines its gradient where not as usual
INDICES = torch.tensor([[0, 1, 2, 1], [0, 2, 1, 1]])


def _draw(count: int) -> Tensor:
    return torch.randn(count, dtype=D, generator=torch.Generator().manual_seed(1))


def _weight_norm() -> Problems:
    yield lambda x: torch._weight_norm(x[:6].reshape(3, 2), x[6:].reshape(3, 1), 0).reshape(-1), _draw(9)


def _sparse_coo() -> Problems:
    yield lambda x: torch.sparse_coo_tensor(INDICES, x, (3, 3)).to_dense().reshape(-1), _draw(4)
    dense = _draw(9).reshape(3, 3)
    yield lambda x: torch.sparse.mm(torch.sparse_coo_tensor(INDICES, x, (3, 3)), dense).reshape(-1), _draw(4)


def _sparse_csr() -> Problems:
    rows, columns = torch.tensor([0, 1, 3, 4]), torch.tensor([0, 1, 2, 1])
    yield lambda x: torch.sparse_csr_tensor(rows, columns, x, (3, 3)).to_dense().reshape(-1), _draw(4)


def _embedding_by_frequency() -> Problems:
    index = torch.tensor([0, 0, 1, 2, 2, 2])
    why = "the gradient is divided by how often a row was used, as its documentation says"
    yield lambda x: F.embedding(index, x.reshape(3, 2), scale_grad_by_freq=True).reshape(-1), _draw(6), why


def _linear_cross_entropy() -> Problems:
    function, options = getattr(F, "linear_cross_entropy", None), getattr(nn, "LinearCrossEntropyOptions", None)
    if function is not None and options is not None:
        target = torch.tensor([0, 2, 1, 1])
        loss = lambda x: function(x[:12].reshape(4, 3), x[12:].reshape(3, 3), target, options=options())
        yield lambda x: loss(x).reshape(1), _draw(21)


MORE: dict[str, Callable[[], Problems]] = {
    "_weight_norm": _weight_norm,
    "sparse_coo_tensor of values": _sparse_coo,
    "sparse_csr_tensor of values": _sparse_csr,
    "embedding, scale_grad_by_freq": _embedding_by_frequency,
    "linear_cross_entropy, chunked": _linear_cross_entropy,
}
