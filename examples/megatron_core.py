"""megatron.core's GPT with its data parallelism and its schedule.

    rankscope run torchrun --standalone --nproc-per-node 4 megatron_core.py

The same command traces Megatron-LM and Megatron-Bridge, whose loops call what this one calls.
"""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from tiny_gpt import LENGTH, NUM_STEPS, VOCABULARY, WIDTH, Texts, be_slow
from torch.utils.data import DataLoader

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    from without_gpu import pretend_that_the_cpu_is_a_gpu

    pretend_that_the_cpu_is_a_gpu()


def forward_step(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple:
    """Return the loss of each token, and the function that makes them one number."""
    tokens = next(batches)
    places = torch.arange(LENGTH - 1).expand(len(tokens), -1)
    mask = torch.ones(1, 1, LENGTH - 1, LENGTH - 1, dtype=torch.bool).triu(1)
    losses = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:])
    return losses, lambda output: (output.mean(), {"loss": output.mean().detach()})


dist.init_process_group("nccl" if HAS_GPU else "gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
if HAS_GPU:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
tensor_parallel.model_parallel_cuda_manual_seed(7)
config = TransformerConfig(
    num_layers=2,
    hidden_size=WIDTH,
    num_attention_heads=4,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    use_cpu_initialization=not HAS_GPU,
    finalize_model_grads_func=finalize_model_grads,
)
gpt = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH)
gpt.register_forward_pre_hook(lambda *_: be_slow())
model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
optimizer = torch.optim.AdamW(model.parameters())
batches = iter(DataLoader(Texts(), batch_size=4))
train = get_forward_backward_func()
for _ in range(NUM_STEPS):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    train(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=[model],
        num_microbatches=2,
        seq_length=LENGTH - 1,
        micro_batch_size=4,
        forward_only=False,
    )
    for weight in model.parameters():
        weight.grad = weight.main_grad
    optimizer.step()
dist.destroy_process_group()
