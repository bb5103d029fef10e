"""Lightning's Trainer, which starts the other ranks itself.

rankscope run python lightning_fit.py
"""

import lightning
import torch
from tiny_gpt import NUM_STEPS, Texts, TinyGPT
from torch.utils.data import DataLoader


class Language(lightning.LightningModule):
    """Next-token prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.network = TinyGPT()

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = self.network(tokens)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of all weights."""
        return torch.optim.AdamW(self.parameters())


trainer = lightning.Trainer(
    devices=4,
    strategy="ddp",
    max_steps=NUM_STEPS,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(Language(), DataLoader(Texts(), batch_size=8, shuffle=True))
