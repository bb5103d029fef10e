"""Checkpoints of the whole job, and the resumption from the newest complete one.

A save has two stages. The training waits while its tensors are copied to the host; a thread of each
rank writes the files behind the next steps. A checkpoint is a folder that gets its name by one
rename when all ranks have written: a process that is killed in either stage leaves the one before.
Tensors are stored under their names in the whole model, so another layout can load them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from collections.abc import Collection
    from concurrent.futures import Future
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from .loop import RankState

T = TypeVar("T")

NUM_KEPT = 2
"""Complete checkpoints that are kept."""

PREFIX, PARTIAL = "step-", ".partial"
OPTIMIZER = "optimizer."


class Checkpoints:
    """The checkpoints of one job in one folder. All ranks must make it, and call what it offers.

    Args:
        folder: A file system that all hosts share.
        every: Steps between two checkpoints.
        state: This rank.
        mesh: The job's mesh.
    """

    def __init__(self, folder: Path, *, every: int, state: RankState, mesh: DeviceMesh) -> None:
        self._folder = folder
        self._every = every
        self._state = state
        self._mesh = mesh
        self._upload: Future[object] | None = None
        self._saved_step: int | None = None
        # The training thread uses the default group while files are written.
        self._group = dist.new_group(backend="gloo")
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

    def resume(self) -> int:
        """Load the newest complete checkpoint; return the first step to train, 0 without one.

        One rank of each data-parallel group reads, and sends the tensors to the others.
        """
        newest = find_newest(self._folder) if self._state.rank == 0 else None
        newest = broadcast_plain(newest, src=0, group=None)
        if newest is None:
            return 0
        group = self._mesh.get_group("dp")
        reader = dist.get_global_rank(group, 0)
        read: dict[str, torch.Tensor] = {}
        if self._state.rank == reader:
            read = read_tensors(self._path(newest), names=self._parameters())
        described = [
            (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in read.items()
        ]
        described = broadcast_plain(described, src=reader, group=group)
        device = next(iter(self._state.stage.parameters())).device
        for name, shape, dtype in described:
            whole = read.get(name, torch.empty(shape, dtype=getattr(torch, dtype))).to(device)
            dist.broadcast(whole, src=reader, group=group)
            self._set(name, whole)
        return newest

    def close(self) -> None:
        """Wait until the last save is complete."""
        self._finish()
        dist.barrier()

    def _path(self, step: int, suffix: str = "") -> Path:
        return self._folder / f"{PREFIX}{step:08d}{suffix}"

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self._state.stage.named_parameters())

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return weights and optimizer state by name, of this rank."""
        state = self._state.optimizer.state
        parameters = self._parameters()
        return {name: parameter.detach() for name, parameter in parameters.items()} | {
            f"{OPTIMIZER}{name}.{key}": value
            for name, parameter in parameters.items()
            for key, value in state.get(parameter, {}).items()
        }

    def _set(self, name: str, whole: torch.Tensor) -> None:
        """Set a weight or a state of the optimizer from the tensor of the whole model."""
        parameters, optimizer = self._parameters(), self._state.optimizer
        with torch.no_grad():
            if name in parameters:
                copy_shard(parameters[name], whole)
                return
            of, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
            parameter = parameters[of]
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


def broadcast_plain(value: T, *, src: int, group: dist.ProcessGroup | None) -> T:
    """Return the value of rank ``src``, which must be plain JSON, on all ranks of a group."""
    sent = torch.tensor(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor(len(sent))
    dist.broadcast(size, src=src, group=group)
    text = sent if dist.get_rank() == src else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, src=src, group=group)
    return cast("T", json.loads(bytes(text.tolist())))


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


def find_newest(folder: Path) -> int | None:
    """Return the newest of `list_steps`; None if there is none."""
    return next(reversed(list_steps(folder)), None)


def read_tensors(path: Path, *, names: Collection[str] | None) -> dict[str, torch.Tensor]:
    """Return tensors of a checkpoint, whole, and the states of the optimizer that belong to them.

    Args:
        path: The checkpoint.
        names: Names of weights; None: all.
    """
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    read: dict[str, torch.Tensor] = {}
    for name, stored in metadata.items():
        weight = (
            name.removeprefix(OPTIMIZER).rpartition(".")[0] if name.startswith(OPTIMIZER) else name
        )
        if isinstance(stored, TensorStorageMetadata) and (names is None or weight in names):
            read[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that only this process reads
        load(read, checkpoint_id=path, no_dist=True)
    return read
