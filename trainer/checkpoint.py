"""Checkpoints of the whole job, and the resumption from the newest complete one.

A save has two stages. The training waits while its tensors are copied to the host; a thread of each
rank writes the files behind the next steps. A checkpoint is a folder that gets its name by one
rename when all ranks have written: a process that is killed in either stage leaves the one before.
Tensors are stored under their names in the whole model, so another layout can load them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .config import coords_of
from .parallel import broadcast_plain

if TYPE_CHECKING:
    from collections.abc import Collection
    from concurrent.futures import Future
    from pathlib import Path

    from .loop import RankState

NUM_KEPT = 2
"""Complete checkpoints that are kept."""

PREFIX, PARTIAL = "step-", ".partial"
OPTIMIZER = "optimizer."
POSITION = "data position"
"""Name of the tensor with the first sample of the next step."""

EXPERT = re.compile(r"(?<=\.experts\.)\d+")


class Checkpoints:
    """The checkpoints of one job, in a folder that all hosts share, every so many steps.

    All ranks must make it, and call what it offers.
    """

    def __init__(self, folder: Path, *, every: int, state: RankState) -> None:
        self._folder = folder
        self._every = every
        self._state = state
        self._upload: Future[object] | None = None
        self._saved_step: int | None = None
        # The training thread uses the default group while files are written.
        self._group = dist.new_group(backend="gloo")
        self._copies = _group_of_copies(state)
        if state.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"{PREFIX}*{PARTIAL}"):
                shutil.rmtree(left)

    def after_step(self, step: int) -> None:
        """Save if a checkpoint is due after a step, or if it was the last one."""
        if (step + 1) % self._every == 0 or step + 1 == self._state.config.num_steps:
            self.save(step + 1)

    def save(self, next_step: int) -> None:
        """Copy the state before ``next_step`` to the host, and begin to write it.

        Waits for the save before, if that is still being written.
        """
        self._finish()
        self._saved_step = next_step
        self._upload = cast(
            "Future[object]",
            async_save(
                self._tensors(),
                storage_writer=FileSystemWriter(self._path(next_step, PARTIAL)),
                process_group=self._group,
            ),
        )
        if self._state.rank == 0:
            self._upload.add_done_callback(lambda upload: self._publish(upload, next_step))

    def resume(self, *, most: int | None = None) -> int:
        """Load the newest complete checkpoint, at most that before step ``most``.

        One rank of those with the same weights reads, and sends the tensors to the others, each of
        which keeps its shard. The loader goes on from the first sample that was not trained on.

        Returns:
            The first step to train; 0 without a checkpoint.
        """
        newest: int | None = None
        position = 0
        if self._state.rank == 0:
            newest = find_newest(self._folder, most=most)
            if newest is not None:
                position = int(read_tensors(self._path(newest), names=[POSITION])[POSITION])
        newest, position = broadcast_plain((newest, position), src=0, group=self._group)
        if newest is None:
            return 0
        self._state.loader.position = position
        reader = dist.get_global_rank(self._copies, 0)
        read: dict[str, torch.Tensor] = {}
        if self._state.rank == reader:
            read = read_tensors(self._path(newest), names=self._names_of_copies())
        described = [
            (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in read.items()
        ]
        described = broadcast_plain(described, src=reader, group=self._copies)
        device = next(iter(self._state.stage.parameters())).device
        own = self._parameters()
        for name, shape, dtype in described:
            whole = read.get(name, torch.empty(shape, dtype=getattr(torch, dtype)))
            dist.broadcast(whole, src=reader, group=self._copies)
            if weight_of(name) in own:
                self._set(name, whole.to(device))
        return int(newest)

    def close(self) -> None:
        """Wait until the last save is complete."""
        self._finish()
        dist.barrier()

    def _path(self, step: int, suffix: str = "") -> Path:
        return self._folder / f"{PREFIX}{step:08d}{suffix}"

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the weights of this rank's chunks by their names in the whole model."""
        return {
            name: parameter
            for chunk in self._state.stage
            for name, parameter in chunk.named_parameters()
        }

    def _names_of_copies(self) -> set[str]:
        """Return the names of the weights of all ranks of this group: each has its own experts."""
        experts = range(max(self._state.config.model.num_experts, 1))
        return {EXPERT.sub(str(number), name) for name in self._parameters() for number in experts}

    def _tensors(self) -> dict[str, torch.Tensor]:
        state = self._state.optimizer.state
        parameters = self._parameters()
        position = torch.tensor(self._state.loader.position)
        weights = {name: parameter.detach() for name, parameter in parameters.items()}
        return (
            {POSITION: position}
            | weights
            | {
                f"{OPTIMIZER}{name}.{key}": value
                for name, parameter in parameters.items()
                for key, value in state.get(parameter, {}).items()
            }
        )

    def _set(self, name: str, whole: torch.Tensor) -> None:
        """Set a weight or a state of the optimizer from the tensor of the whole model."""
        parameters, optimizer = self._parameters(), self._state.optimizer
        with torch.no_grad():
            if name in parameters:
                copy_shard(parameters[name], whole)
                return
            parameter, key = parameters[weight_of(name)], name.rpartition(".")[2]
            if whole.shape != parameter.shape:
                optimizer.state[parameter][key] = whole
                return
            optimizer.state[parameter][key] = torch.zeros_like(parameter)
            copy_shard(optimizer.state[parameter][key], whole)

    def _finish(self) -> None:
        if self._upload is not None and self._saved_step is not None:
            self._upload.result()
            if self._state.rank == 0:  # its own callback may still be under way
                self._publish(self._upload, self._saved_step)
            self._upload = None

    def _publish(self, upload: Future[object], step: int) -> None:
        """Give a complete checkpoint its name, and delete the oldest ones."""
        if upload.exception() is not None:
            return
        with contextlib.suppress(FileNotFoundError):  # done already
            self._path(step, PARTIAL).rename(self._path(step))
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        for old in list_steps(self._folder)[:-NUM_KEPT]:
            shutil.rmtree(self._path(old), ignore_errors=True)


def _group_of_copies(state: RankState) -> dist.ProcessGroup:
    """Return the group of the ranks that have the same weights, except of experts."""
    layout = state.config.layout
    ranks_by_place: dict[tuple[int, int], list[int]] = {}
    for rank in range(layout.world_size):
        coords = coords_of(rank, layout)
        ranks_by_place.setdefault((coords.pp, coords.tp), []).append(rank)
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        [*ranks_by_place.values()], backend="gloo"
    )
    return group


def weight_of(name: str) -> str:
    """Return the name of the weight to which a tensor of a checkpoint belongs."""
    if not name.startswith(OPTIMIZER):
        return name
    return name.removeprefix(OPTIMIZER).rpartition(".")[0]


def copy_shard(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's shard of a tensor into ``target``, in place."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    shape, begin = compute_local_shape_and_global_offset(
        whole.shape, target.device_mesh, target.placements
    )
    mine = tuple(slice(at, at + size) for at, size in zip(begin, shape, strict=True))
    target.to_local().copy_(whole[mine])


def list_steps(folder: Path) -> list[int]:
    """Return the steps before which the complete checkpoints of a folder were made, ascending."""
    names = (path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*"))
    return sorted(int(name) for name in names if name.isdecimal())


def find_newest(folder: Path, *, most: int | None = None) -> int | None:
    """Return the newest of `list_steps`, at most ``most``; None if there is none."""
    steps = (step for step in reversed(list_steps(folder)) if most is None or step <= most)
    return next(steps, None)


def read_tensors(path: Path, *, names: Collection[str] | None) -> dict[str, torch.Tensor]:
    """Return weights of a checkpoint by name, whole, with their optimizer states; None: all."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    read: dict[str, torch.Tensor] = {}
    for name, stored in metadata.items():
        is_wanted = names is None or weight_of(name) in names
        if isinstance(stored, TensorStorageMetadata) and is_wanted:
            read[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that only this process reads
        load(read, checkpoint_id=path, no_dist=True)
    return read
