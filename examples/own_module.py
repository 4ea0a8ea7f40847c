"""Any LightningModule trains with `strategy="protrain"`, here a vision transformer that knows of no chunks."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_protrain import ProTrainStrategy


class VisionTransformer(L.LightningModule):
    """Finds the quarter of an image that is bright; the strategy finds the repeated blocks by itself."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=8, stride=8)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, images: Tensor) -> Tensor:  # [batch, 3, 32, 32] to [batch, 4]
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions  # [batch, patches, width]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, quarters = batch
        loss = nn.functional.cross_entropy(self(images), quarters)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def main(width: int = 128, depth: int = 8, max_steps: int = 100, plan: str = "auto") -> None:
    L.seed_everything(0)
    quarters = torch.randint(4, (2048,))
    images = torch.randn(2048, 3, 2, 16, 2, 16)
    images[torch.arange(2048), :, quarters // 2, :, quarters % 2] += 0.3
    loader = DataLoader(TensorDataset(images.reshape(2048, 3, 32, 32), quarters), batch_size=64, shuffle=True)
    strategy = ProTrainStrategy(plan=plan)
    trainer = L.Trainer(strategy=strategy, devices=1, max_steps=max_steps, logger=False, enable_checkpointing=False)
    trainer.fit(VisionTransformer(width, depth), loader)
    print(f"train_loss {float(trainer.callback_metrics['train_loss']):.4f}")


if __name__ == "__main__":
    main()
