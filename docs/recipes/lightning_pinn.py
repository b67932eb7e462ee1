"""A physics-informed network trained by Lightning, and the sharpness of its loss."""

import lightning as L
import torch
from torch.utils.data import DataLoader

import hodiff


class Poisson(L.LightningModule):
    """u'' = f on the unit square, with u = 0 on its boundary by construction."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2, 16),
            torch.nn.Tanh(),
            torch.nn.Linear(16, 16),
            torch.nn.Tanh(),
            torch.nn.Linear(16, 1),
        )

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x, y = z[:, 0], z[:, 1]
        # the factor is at most 1
        return 16 * x * (1 - x) * y * (1 - y) * self.net(z).squeeze(-1)

    def residual(self, z: torch.Tensor) -> torch.Tensor:
        return hodiff.laplacian(self, z) + 2 * torch.pi**2 * torch.sin(
            torch.pi * z
        ).prod(-1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        # Lightning calls backward: nothing else is needed
        return self.residual(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        # Lightning validates under inference_mode, where autograd.grad fails.
        self.log("residual", self.residual(batch).abs().max())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Sharpness(L.Callback):
    """The largest eigenvalue of the Hessian over the training data, now and then."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if (trainer.current_epoch + 1) % 10:
            return

        def loss(net: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
            z = batch.to(module.device)
            return module.residual(z).square().sum(), len(z)

        H = hodiff.HessianOperator(loss, module.net, data=trainer.train_dataloader)
        top = hodiff.eigsh(H, 1, rtol=1e-2)
        loss, sharpness = H.value.item(), top.value.item()
        epoch = trainer.current_epoch + 1
        print(f"epoch {epoch}: loss {loss:.2f}, sharpness {sharpness:.0f}")


def main() -> None:
    L.seed_everything(0, verbose=False)
    points = torch.rand(256, 2)
    trainer = L.Trainer(
        max_epochs=30,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Sharpness()],
    )
    model = Poisson()
    trainer.fit(
        model,
        DataLoader(points, batch_size=64, shuffle=True),
        DataLoader(torch.rand(64, 2), batch_size=64),
    )
    largest = trainer.callback_metrics["residual"].item()
    print(f"largest residual in validation: {largest:.1f} of {2 * torch.pi**2:.1f}")


if __name__ == "__main__":
    main()
