"""Ray Train's TorchTrainer, whose workers are processes of Ray.

rankscope run python ray_train.py
"""

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from tiny_gpt import NUM_STEPS, Texts, TinyGPT
from torch.utils.data import DataLoader


def train_on_worker() -> None:
    """Train on one worker."""
    model = prepare_model(TinyGPT())
    optimizer = torch.optim.AdamW(model.parameters())
    loader = prepare_data_loader(DataLoader(Texts(), batch_size=8, shuffle=True))
    for step, tokens in enumerate(loader):
        if step == NUM_STEPS:
            break
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ray.train.report({"loss": loss.item()})


scaling = ScalingConfig(num_workers=4, use_gpu=torch.cuda.is_available())
TorchTrainer(train_on_worker, scaling_config=scaling).fit()
