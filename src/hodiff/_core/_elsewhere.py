"""What to write for names, keywords and positions of other libraries: one table, loaded when it is
asked.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hodiff.errors import InputError

_WAYS = (
    # names of the package
    ("hodiff.", "argmin root fixed_point", "write hodiff.implicit.{}."),
    (
        "hodiff.",
        "explain inspect lifetime monitor predict release shared watch",
        "write hodiff.graph.{}.",
    ),
    ("hodiff.", "color plan_hessian plan_jacobian sparsity_pattern", "write hodiff.sparse.{}."),
    ("hodiff.", "SGD Adam AdamW", "write hodiff.rules.{}."),
    (
        "hodiff.",
        "rules.Lion rules.LAMB rules.Muon rules.NAdam rules.RAdam rules.Adamax rules.LBFGS "
        "rules.RMSprop rules.Adagrad",
        "a rule is also any function (params, grads, state, step) -> (params, state).",
    ),
    ("hodiff.", "report", "write hodiff.jets.{}."),
    ("hodiff.", "convergence", "write hodiff.plotting.{}."),
    ("hodiff.", "gradient autograd", "write hodiff.grad(f, x)."),
    (
        "hodiff.",
        "backward GradientTape tape",
        "write hodiff.grad(f, x) or value_and_grad; penalties are losses: penalty.backward().",
    ),
    (
        "hodiff.",
        "func functional nn optim optimizers losses operators linalg",
        "names are not grouped so: hodiff.hvp, hodiff.LevenbergMarquardt, hodiff.HessianOperator.",
    ),
    (
        "hodiff.",
        "influence influence_function influences",
        "write hodiff.solve(hodiff.GaussNewtonOperator(predict, loss, model, data=data) + damping, "
        "v), and times the gradients of hodiff.per_sample_grad.",
    ),
    ("hodiff.", "grad_and_value", "write hodiff.value_and_grad(f, x), the value first."),
    ("hodiff.", "jacrev jacfwd jac", "write hodiff.jacobian(f, x)."),
    ("hodiff.", "jacobian_vector_product linearize", "write hodiff.jvp(f, x, v)."),
    ("hodiff.", "vector_jacobian_product", "write hodiff.vjp(f, x, u)."),
    ("hodiff.", "vhp", "write hodiff.hvp(f, x, v): a Hessian is symmetric."),
    ("hodiff.", "hessian_vector_product hessian_vector", "write hodiff.hvp(f, x, v)."),
    ("hodiff.", "vmap", "write hodiff.grad(f, x, batch_ndim=1), which other calls take, too."),
    ("hodiff.", "functional_call make_functional", "give the module itself: f(model)."),
    ("hodiff.", "derivative diff", "write hodiff.nth_derivative(f, x, n), or hodiff.partial."),
    ("hodiff.", "per_example_grad BatchGrad", "write hodiff.per_sample_grad(f, model, batch)."),
    ("hodiff.", "ntk empirical_ntk", "write hodiff.gram(f, model, batch)."),
    ("hodiff.", "div jacobian_trace", "write hodiff.divergence(f, x)."),
    ("hodiff.", "laplace forward_laplacian", "write hodiff.laplacian(f, x)."),
    ("hodiff.", "gradcheck gradgradcheck", "write hodiff.check_derivatives(f, x)."),
    ("hodiff.", "compile", "write hodiff.compile_step(loss, model)."),
    (
        "hodiff.",
        "GradientPenalty gp gp_loss",
        "write hodiff.wgan_gp_penalty(D, real, fake), or hodiff.gradient_penalty(D, x).",
    ),
    (
        "hodiff.",
        "HessianLinearOperator HVPOperator Hessian",
        "write hodiff.HessianOperator(f, model).",
    ),
    (
        "hodiff.",
        "GGNLinearOperator GGN GGNOperator",
        "write hodiff.GaussNewtonOperator(predict, loss, model, data=data).",
    ),
    (
        "hodiff.",
        "FisherMCLinearOperator FIM Fisher fisher",
        "write hodiff.FisherOperator(predict, loss, model, data=data, kind='exact').",
    ),
    (
        "hodiff.",
        "empirical_fisher EFLinearOperator",
        "write hodiff.FisherOperator(predict, loss, model, data=data, kind='empirical').",
    ),
    (
        "hodiff.",
        "KFACLinearOperator KFAC EKFACLinearOperator Shampoo",
        "hodiff approximates no curvature by factors; hodiff.GaussNewtonOperator is exact.",
    ),
    (
        "hodiff.",
        "eigenvalues eigenvectors eigs eigh eigvalsh lobpcg power_iteration "
        "compute_hessian_eigenthings",
        "write hodiff.eigsh(hodiff.HessianOperator(f, model), k).",
    ),
    ("hodiff.", "lanczos slq density", "write hodiff.spectral_density(H), or hodiff.eigsh(H, k)."),
    (
        "hodiff.",
        "hutchinson_trace hutchinson hutchpp xtrace hessian_trace",
        "write hodiff.trace(hodiff.HessianOperator(f, model)).",
    ),
    ("hodiff.", "hutchinson_diag diag xdiag", "write hodiff.diagonal(H)."),
    (
        "hodiff.",
        "cg conjugate_gradient minres ihvp inverse_hvp inverse lissa neumann",
        "write hodiff.solve(H, b) for the inverse of an operator times b.",
    ),
    ("hodiff.", "slogdet log_det", "write hodiff.logdet(H)."),
    ("hodiff.", "LM least_squares curve_fit", "write hodiff.LevenbergMarquardt(residuals, model)."),
    ("hodiff.", "custom_root", "write hodiff.implicit.root(F, x)."),
    ("hodiff.", "custom_fixed_point", "write hodiff.implicit.fixed_point(g, x)."),
    # attributes of values, by their class; * is any other
    (
        "LinearOperator.",
        "toarray todense to_dense numpy tolist item A",
        "its matrix is the tensor H.dense().",
    ),
    (
        "LinearOperator.",
        "eigenvalues eigvals eigvalsh eig eigh eigs eigsh",
        "write hodiff.eigsh(H, k).",
    ),
    ("LinearOperator.", "diag diagonal", "write hodiff.diagonal(H)."),
    ("LinearOperator.", "trace", "write hodiff.trace(H)."),
    ("LinearOperator.", "det slogdet logdet", "write hodiff.logdet(H)."),
    (
        "LinearOperator.",
        "inverse inv pinv solve cholesky",
        "write hodiff.solve(H, b) for its inverse times b.",
    ),
    ("LinearOperator.", "mv mm matmul matmat dot apply", "write H @ v."),
    ("LinearOperator.", "t transpose mT H adjoint", "write H.T."),
    ("LinearOperator.", "norm", "write H.dense().norm()."),
    ("LinearOperator.", "size ndim dim numel __len__", "its size is H.shape."),
    (
        "LinearOperator.",
        "to cpu cuda double float half",
        "it has the dtype and device of its point; convert that, and make it again.",
    ),
    (
        "LinearOperator.",
        "detach requires_grad backward",
        "its products are detached; for derivatives use hodiff.hvp, jvp or vjp.",
    ),
    (
        "LinearOperator.",
        "value gradient",
        "only the Hessian and Gauss-Newton operators evaluate a function.",
    ),
    (
        "LinearOperator.",
        "*",
        "write H @ v for a product; hodiff.eigsh, trace, diagonal, logdet and solve take H.",
    ),
    ("Plan.", "*", "plan(x) is the matrix at x, plan.values(x) are its entries."),
    (
        "CompiledStep.",
        "*",
        "value = step(*batch) is the loss, and value.backward() its gradient; parameters are those "
        "of the model.",
    ),
    # keywords: what ends in = is ours, the first that a function has; else a sentence
    ("", "tol= atol= tolerance= epsilon= eps=", "rtol= gradient_tol="),
    ("", "maxiter= max_iter= num_iters= iters= n_iter=", "iterations= products= steps="),
    ("", "n_samples= num_samples= num_matvecs= n_v= num_vecs= num_probes=", "samples="),
    ("", "bins= num_bins= grid=", "points="),
    ("", "sigma= bandwidth=", "width="),
    ("", "distribution= sampler=", "probes="),
    ("", "loader= dataloader= dataset=", "data="),
    ("", "num_data= batch_size_fn=", "batch_weight="),
    ("", "progressbar= verbose= disp=", "progress="),
    ("", "x0= init= init_x=", "start="),
    ("", "M= precond= P=", "preconditioner="),
    ("", "lam= mu= jitter=", "damping= shift= weight="),
    ("", "lambda_gp= lambda_= gp_weight= gp_lambda= coef= scale=", "weight= gamma="),
    ("", "p= norm_type=", "ord="),
    ("", "k= center=", "target="),
    ("", "vectorize= chunks= batch_size=", "chunk_size="),
    ("", "return_out= outputs=", "return_outputs="),
    ("", "mode= strategy= outer_jacobian_strategy=", "method= backend="),
    (
        "",
        "seed= key= rng= random_state=",
        "Random vectors come from generator=torch.Generator().manual_seed(0), or from "
        "torch.manual_seed.",
    ),
    (
        "",
        "argnums= argnum= inputs= wrt=",
        "The derivative is by the argument after the function; for several give one tuple, "
        "(x, y), which the function takes as one argument.",
    ),
    (
        "",
        "allow_unused= materialize_grads=",
        "Zeros stand for what does not matter where another tensor does; strict=False gives them "
        "always.",
    ),
    ("", "grad_outputs= grad_output= cotangents=", "For a vector in front: hodiff.vjp(f, x, u)."),
    (
        "",
        "retain_graph= keep_graph= free_graph=",
        "Given a function, hodiff builds the graph and frees it; given a tensor, the graph is "
        "yours and stays.",
    ),
    (
        "",
        "device= dtype=",
        "Results have the device and dtype of the point: convert that.",
    ),
    ("", "lr= learning_rate=", "The step is chosen by damping=, which needs no rate."),
    ("unroll.", "lr= learning_rate= optimizer=", "The rule has it: hodiff.rules.SGD(lr=0.1)."),
    ("compile_step.", "mode= fullgraph= dynamic=", "A step is always one graph; backend= is all."),
    ("compile_step.", "optimizer=", "The loop steps it, after value.backward()."),
    ("eigsh.", "top_n= n= num_eigenthings= n_components=", "Write hodiff.eigsh(H, k)."),
    ("eigsh.", "maxiter= max_iter= num_iters=", "products="),
    (
        "partial.",
        "i= j= dim= dims=",
        "Write hodiff.partial(f, x, (0, 1)) for the second by x0, x1.",
    ),
    # positions; what is missing
    ("", "'x'", "hodiff returns values, not functions, so the point is given as well."),
    ("", "'v' 'u'", "hodiff returns values, not functions, so the vector is given as well."),
    (
        "",
        "grad() value_and_grad() jacobian() hessian() hessian_diagonal() value_grad_and_hessian()",
        "Several points are one tuple, (x, y), which f takes as one argument; data for f go to "
        "args=(y,).",
    ),
    ("", "hvp() jvp() vjp()", "Data for f go to args=(y,)."),
    ("", "per_sample_grad() gram()", "The batch is one argument, which f receives: (x, y)."),
    (
        "",
        "gradient_penalty()",
        "Between two batches: hodiff.wgan_gp_penalty(D, real, fake), with its weight=10.",
    ),
    ("", "wgan_gp_penalty() dragan_penalty()", "The factor is weight=10, labels args=(labels,)."),
    ("", "r1_penalty() r2_penalty()", "The factor is gamma=10, and labels are args=(labels,)."),
    (
        "",
        "laplacian() value_grad_and_laplacian() divergence() biharmonic() curl()",
        "The coordinates are one tensor, (N, D); columns that are not differentiated go to "
        "args=(t,).",
    ),
    ("", "partial()", "The coordinates to differentiate by are one tuple: (0, 1)."),
    (
        "",
        "eigsh() trace() diagonal() logdet() spectral_density() solve() nystrom()",
        "An operator comes first: H = hodiff.HessianOperator(loss, model).",
    ),
    ("", "multi_grad()", "The losses are one list: hodiff.multi_grad([a, b], model)."),
    (
        "",
        "argmin() root() fixed_point()",
        "Solve first, with any solver: the solution is the second argument.",
    ),
    (
        "",
        "LevenbergMarquardt()",
        "Its residuals are a function: hodiff.LevenbergMarquardt(lambda model, batch: model(batch) "
        "- y, model).",
    ),
    (
        "",
        "GaussNewtonOperator() FisherOperator()",
        "Outputs and loss are apart: predict(model, batch), loss(outputs, targets), model.",
    ),
    ("", "HessianOperator() JacobianOperator()", "A function, then the model: (f, model)."),
    ("", "monitor()", "Each root has a name of yours: hodiff.graph.monitor(loss=loss)."),
    ("", "compile_step()", "The model comes second: hodiff.compile_step(loss, model)."),
    ("", "unroll()", "A function, the start, a rule, a number: (f, x, hodiff.rules.SGD(0.1), 10)."),
    (
        "",
        "twice_differentiable() watch() lifetime()",
        "It is a context: a with block holds what it is for.",
    ),
)
ELSEWHERE = {f"{at}{each}": way.format(each) for at, names, way in _WAYS for each in names.split()}
"""What to write, by a name, keyword or position of other libraries."""


class Misfit(InputError, TypeError):
    """Arguments that a signature does not have, for which Python raises a `TypeError`."""


def unmet(public: Callable[..., Any], kwargs: Mapping[str, Any], reason: str) -> str:
    """The words for arguments that a signature does not have, of which Python gives the reason."""
    parameters = inspect.signature(public).parameters
    name = public.__qualname__.removesuffix(".__init__")
    named = [f"{each}=" for each, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    given = (
        "**" * (p.kind is p.VAR_KEYWORD) + each
        for each, p in parameters.items()
        if f"{each}=" not in named and each != "self"
    )
    word = next((f"{each}=" for each in kwargs if each not in parameters), "")
    reason = reason.partition("() ")[2].partition(". Did")[0]
    missing = reason.partition(": ")[2].partition(" ")[0].strip(",")
    keys = (f"{name}.{word}", word) if word else (missing, f"{name}()")
    way = next((ELSEWHERE[key] for key in keys if key in ELSEWHERE), "=")
    if way.endswith("="):
        ours = [each for each in way.split() if each in named]
        way = f"Write {ours[0]}." if ours else f"Its keywords: {', '.join(named)}."
    package = "hodiff" if name in dir(sys.modules["hodiff"]) else public.__module__.split("._")[0]
    return f"{package}.{name}({', '.join(given)}): {reason}. {way}"
