"""Lightning's Trainer with DDP and a validation after each epoch."""

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from tiny import BATCH_SIZE, NUM_STEPS, Texts, TinyGPT, loss_of
from torch.utils.data import DataLoader

NUM_RANKS = 4


class Language(lightning.LightningModule):
    """Next-token prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.network = TinyGPT()

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.network(batch["input_ids"])
        return loss_of(logits[:, :-1], batch["labels"][:, 1:])

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("validation loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


num_texts = NUM_STEPS // 2 * BATCH_SIZE * NUM_RANKS
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=NUM_RANKS,
    strategy=DDPStrategy(process_group_backend="gloo"),
    max_epochs=2,
    log_every_n_steps=5,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
)
trainer.fit(
    Language(),
    DataLoader(Texts(num_texts), batch_size=BATCH_SIZE, shuffle=True),
    DataLoader(Texts(64), batch_size=BATCH_SIZE),
)
