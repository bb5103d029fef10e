"""Hugging Face's Trainer with a small Llama.

rankscope run torchrun --standalone --nproc-per-node 4 hf_trainer.py
"""

import tempfile

import torch
from tiny_gpt import LENGTH, NUM_STEPS, VOCABULARY, WIDTH, Texts, be_slow
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Examples(Texts):
    """Texts as the models of transformers take them."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = super().__getitem__(index)
        return {"input_ids": tokens, "labels": tokens}


model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
)
model.register_forward_pre_hook(lambda *_: be_slow())
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        max_steps=NUM_STEPS,
        logging_steps=5,
        report_to=[],
        save_strategy="no",
    )
    Trainer(model=model, args=arguments, train_dataset=Examples()).train()
