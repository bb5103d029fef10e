"""A stand-in for ``megatron.training``, which is in no package: only its loop.

Signatures and order of calls are those of Megatron-LM's ``megatron/training/training.py`` as of
2026 (its commit 04b08b02; 001b00c2, with core 0.16, has no last two arguments of ``train_step``).
``train_step`` uses megatron.core itself.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

calculator: Any = import_module("megatron.core.num_microbatches_calculator")
pipeline: Any = import_module("megatron.core.pipeline_parallel")


def train_step(
    forward_step_func: object,
    data_iterator: object,
    model: list[torch.nn.Module],
    optimizer: torch.optim.Optimizer,
    opt_param_scheduler: None,
    config: object,
    forward_backward_func: Callable[..., list[dict[str, float]]],
    iteration: int | None = None,
    pg_collection: None = None,
    p2p_communicator: None = None,
) -> tuple[list[dict[str, float]], int, bool, bool, int, None, None, int]:
    """Run the schedule of megatron.core and step the optimizer."""
    args = get_args()
    optimizer.zero_grad()
    losses = forward_backward_func(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=calculator.get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
        pg_collection=pg_collection,
        p2p_communicator=p2p_communicator,
    )
    optimizer.step()
    return losses, 0, False, False, 0, None, None, 0


def train(
    forward_step_func: object,
    model: list[torch.nn.Module],
    optimizer: torch.optim.Optimizer,
    opt_param_scheduler: None,
    train_data_iterator: object,
    config: object,
) -> int:
    """Train, skip the iterations to skip, and save after the last."""
    args = get_args()
    training = sys.modules["megatron.training.training"]
    forward_backward_func = pipeline.get_forward_backward_func()
    iteration: int = args.iteration
    while iteration < args.train_iters:
        calculator.update_num_microbatches(args.consumed_train_samples, consistency_check=True)
        if iteration + 1 in args.iterations_to_skip:
            iteration += 1
            continue
        args.curr_iteration = iteration
        losses, *_ = training.train_step(
            forward_step_func,
            train_data_iterator,
            model,
            optimizer,
            opt_param_scheduler,
            config,
            forward_backward_func,
            iteration=iteration,
            pg_collection=None,
            p2p_communicator=None,
        )
        args.losses.extend(each["loss"] for each in losses)
        iteration += 1
        args.consumed_train_samples += args.micro_batch_size * calculator.get_num_microbatches()
    training.save_checkpoint(iteration)
    return iteration


def save_checkpoint(iteration: int) -> None:
    """Do nothing: only the name matters."""


def get_args() -> Any:  # noqa: ANN401 - a Namespace
    """Return the arguments of the command line."""
    return sys.modules["megatron.training"].ARGUMENTS


def stand_in(arguments: SimpleNamespace) -> ModuleType:
    """Install the loop under Megatron-LM's module name; return that module."""
    training: Any = ModuleType("megatron.training.training")
    training.train_step, training.train = train_step, train
    training.save_checkpoint = save_checkpoint
    package: Any = ModuleType("megatron.training")
    package.get_args, package.training, package.ARGUMENTS = get_args, training, arguments
    sys.modules.update({package.__name__: package, training.__name__: training})
    found: ModuleType = training
    return found
