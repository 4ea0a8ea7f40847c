"""Any LightningModule trains with `strategy="protrain"`: the module does not know of chunks or blocks."""

from __future__ import annotations

import argparse

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_protrain  # noqa: F401  (registers the strategy)


class Residual(nn.Module):
    """A block of two linear layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, width]
        return x + self.layers(x)


class Denoiser(L.LightningModule):
    """A denoiser of vectors; the strategy finds its repeated blocks by itself."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        clean = batch[0]
        loss = nn.functional.mse_loss(self(clean + 0.5 * torch.randn_like(clean)), clean)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--max-steps", type=int, default=100)
    args = parser.parse_args()

    L.seed_everything(0)
    basis = torch.randn(4, args.width)
    vectors = torch.randn(2048, 4) @ basis  # [samples, width], on a plane of four dimensions
    loader = DataLoader(TensorDataset(vectors), batch_size=64, shuffle=True)
    trainer = L.Trainer(strategy="protrain", max_steps=args.max_steps, logger=False, enable_checkpointing=False)
    trainer.fit(Denoiser(args.width, args.depth), loader)
    print(f"train_loss {float(trainer.callback_metrics['train_loss']):.4f}")


if __name__ == "__main__":
    main()
