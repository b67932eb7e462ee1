"""Curvature of one model, the data shared among processes.

torchrun --nproc-per-node 2 several_processes.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits

import hodiff


def main(group: dist.ProcessGroup | None) -> None:
    """Trace, eigenvalues, their density and a natural-gradient step.

    Without a group, of all the data in this process.
    """
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    digits = load_digits()
    inputs = torch.tensor(digits.data[:300] / 16)
    targets = torch.tensor(digits.target[:300])
    # five, the last one shorter
    batches = list(zip(inputs.split(64), targets.split(64), strict=True))
    torch.manual_seed(0)  # the same model on every rank
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)
    ).double()

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(
            batch[1]
        )

    share = batches[
        rank::world
    ]  # of two ranks the first has three batches, the other one two
    H = hodiff.HessianOperator(loss, model, data=share, process_group=group)
    trace = hodiff.trace(H, samples=20, generator=torch.Generator().manual_seed(0))
    top = hodiff.eigsh(H, 2, generator=torch.Generator().manual_seed(0))
    density = hodiff.spectral_density(
        H, samples=4, steps=20, generator=torch.Generator().manual_seed(0)
    )
    large, error = density.mean(lambda eigenvalue: (eigenvalue.abs() > 0.05).double())

    cross_entropy = torch.nn.CrossEntropyLoss()
    predict = lambda model, batch: model(batch[0])  # noqa: E731
    G = hodiff.GaussNewtonOperator(
        predict, cross_entropy, model, data=share, process_group=group
    )
    step = hodiff.solve(G, G.gradient, damping=0.1).value
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= step[name]
    H.refresh()
    if rank == 0:
        print(f"trace {trace.value:.6f} ± {trace.stderr:.6f}")
        print("top eigenvalues", *(f"{value:.6f}" for value in top.value))
        print(
            f"of all eigenvalues {100 * large:.2f} ± {100 * error:.2f} % "
            "are beyond 0.05"
        )
    after = H.value  # on every rank: all take part
    if rank == 0:
        print(f"loss after a natural-gradient step {after:.6f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.group.WORLD)
    dist.destroy_process_group()
