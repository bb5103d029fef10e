"""DeepSpeed with ZeRO stage 1.

rankscope run deepspeed --num_gpus 4 deepspeed_zero.py
"""

import argparse

import deepspeed
from tiny_gpt import NUM_STEPS, Texts, TinyGPT

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
parser.parse_args()

config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
}
model = TinyGPT()
engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=Texts(), config=config
)
for index, tokens in enumerate(loader):
    if index == 2 * NUM_STEPS:
        break
    loss = engine(tokens.to(engine.device))
    engine.backward(loss)
    engine.step()
