"""Hugging Face's Trainer, with logging, an evaluation and a save."""

import tempfile

from tiny import (
    BATCH_SIZE,
    NUM_HEADS,
    NUM_LAYERS,
    NUM_STEPS,
    SEQ_LENGTH,
    VOCABULARY,
    WIDTH,
    Texts,
    pace,
)
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    intermediate_size=4 * WIDTH,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=NUM_HEADS,
    max_position_embeddings=SEQ_LENGTH,
)
model = LlamaForCausalLM(config)
pace(model.model.layers)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH_SIZE,
        max_steps=NUM_STEPS,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=NUM_STEPS // 2,
        save_steps=NUM_STEPS // 2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(
        model=model,
        args=arguments,
        train_dataset=Texts(4 * NUM_STEPS * BATCH_SIZE),
        eval_dataset=Texts(64),
    ).train()
