"""Lightning's Trainer, healed: of the script alone, the strategy is another one.

A task's `entry`, with `global_batch: 8, micro_batch: 2, iterations: 12`; or `python
examples/recipes/lightning_module.py` (docs/use/adapters.md). Needs `lightning`.
"""

import os
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from unicrond import LightningStrategy

DIRECTORY = os.environ.get("LIGHTNING_DIR", "lightning_logs")


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(rows), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rows, targets = batch
        self.log("held_out", torch.nn.functional.mse_loss(self.layers(rows), targets))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Rows(lightning.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(29, 8, generator=generator)
        self.data = TensorDataset(rows, (rows @ torch.randn(8, 1, generator=generator)).tanh())

    def train_dataloader(self) -> Any:
        data = torch.utils.data.Subset(self.data, range(21))
        return DataLoader(data, 2, sampler=DistributedSampler(data, 1, 0))

    def val_dataloader(self) -> Any:
        return DataLoader(torch.utils.data.Subset(self.data, range(21, 29)), 8)


class Losses(lightning.Callback):
    """Prints the loss of each step, over the whole global batch."""

    loss = 0.0

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: Any, *rest: Any
    ) -> None:
        self.loss += float(outputs["loss"])
        if not trainer.fit_loop._should_accumulate():
            if trainer.is_global_zero:
                print(f"step {trainer.global_step}: loss {self.loss:.6f}", flush=True)
            self.loss = 0.0

    def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            print(f"step {trainer.global_step}: held out {trainer.callback_metrics['held_out']:.6f}", flush=True)


if __name__ == "__main__":
    lightning.seed_everything(1)
    trainer = lightning.Trainer(
        strategy=LightningStrategy(),
        accumulate_grad_batches=4,
        max_epochs=4,
        gradient_clip_val=1.0,
        default_root_dir=DIRECTORY,
        logger=False,
        enable_progress_bar=False,
        callbacks=[Losses()],
    )
    trainer.fit(Regression(), datamodule=Rows())
