"""What older releases of PyTorch lack: its tests are skipped there, for reasons that the page of versions has."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from hodiff._core._versions import RELEASE


def since(release: tuple[int, int], lacking: str) -> pytest.MarkDecorator:
    """The mark of a test that needs a release; `lacking` says what users of an older one do without."""
    return pytest.mark.skipif(release > RELEASE, reason=f"before PyTorch {'.'.join(map(str, release))} {lacking}")


def marked(names: Iterable[str], mark: pytest.MarkDecorator, which: Collection[str]) -> list[Any]:
    """The cases of a table, with the mark on those that need it."""
    table = list(names)
    unknown = set(which) - set(table)
    assert not unknown, f"no case has these names: {unknown}"
    return [pytest.param(name, marks=[mark] if name in which else []) for name in table]


CHECKPOINTS = since((2, 13), "checkpoint= is refused")
STEPS = since((2, 13), "compile_step is refused")
SHARDS = since((2, 13), "sharded models are refused")
SEVERAL = since((2, 12), "a Function's saved tensors are not told one by one")
CHANGES = since((2, 12), "it is not told which tensor was changed in place, and by which line")
GRID_SAMPLE = since((2, 12), "grid_sample has no second derivative")
LACKING = frozenset({"compile_step"} if RELEASE < (2, 13) else ())
"""Public names that do nothing but say so: the tables of what names do leave them out."""
UNLOADED = ("steps._dynamo",) if LACKING else ()
"""Modules that stand on what only newer releases have; nothing loads them here."""


LOOKED_AT = (
    "EmbeddingBackward0",
    "MeanBackward0",
    "MeanBackward1",
    "NativeBatchNormBackward0",
    "ScaledDotProductFlashAttentionForCpuBackward0",
    "SumBackward0",
    "SumBackward1",
)
"""Classes of nodes that `_versions.LOOKS` makes for what they tell."""

NOT_TRIED = {
    "GeneratedBackwardFor__c10d_functional__wrap_tensor_autograd_defaultBackward": "made in a process group alone",
    "MkldnnRnnLayerBackward0": "made by oneDNN alone, which some builds lack",
    "CudnnRnnBackward0": "cuDNN's: without a second derivative in any case, and PyTorch says so",
    "CudnnBatchNormBackward0": "cuDNN's",
    "MiopenBatchNormBackward0": "MIOpen's",
    **dict.fromkeys(
        (
            *("SpecialBesselJ0Backward0", "SpecialBesselJ1Backward0"),
            *("SpecialModifiedBesselI0Backward0", "SpecialModifiedBesselI1Backward0"),
        ),
        "until 2.14 PyTorch makes none",
    ),
    "linear_cross_entropy": "3 s; a Function, of which one unknown would be warned of",
}
"""Classes of which none can be made there, or not at once."""
