"""Measurements of one rank: matmul, memory, copies, loopback, and collectives of a group.

Each takes well under a second. torch is imported when a measurement runs.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LOOPBACK_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
NUM_TIMES = 7
NUM_COLLECTIVES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the measurements."""

    matmul: int
    """Rows and columns of both matrices."""

    copy_bytes: int
    collective_bytes: int


CPU_SIZES = Sizes(matmul=512, copy_bytes=32 << 20, collective_bytes=4 << 20)
GPU_SIZES = Sizes(matmul=8192, copy_bytes=1 << 30, collective_bytes=256 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """Speeds of one device; None: not measured."""

    matmul_tflop_per_s: float
    memory_gb_per_s: float
    to_device_gb_per_s: float | None
    from_device_gb_per_s: float | None


def measure_device(device: Any) -> DeviceSpeed:  # noqa: ANN401  # torch.device
    """Return what a device achieves in matmuls and copies."""
    import torch

    is_gpu = device.type == "cuda"
    sizes = GPU_SIZES if is_gpu else CPU_SIZES
    dtype = torch.bfloat16 if is_gpu else torch.float32
    left = torch.ones(sizes.matmul, sizes.matmul, dtype=dtype, device=device)
    right = torch.ones_like(left)
    product_s = _time(lambda: left @ right, device)
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _time(lambda: target.copy_(source), device)
    there_s = back_s = None
    if is_gpu:
        pinned = torch.ones(sizes.copy_bytes, dtype=torch.uint8, pin_memory=True)
        there_s = _time(lambda: target.copy_(pinned, non_blocking=True), device)
        back_s = _time(lambda: pinned.copy_(target, non_blocking=True), device)
    num_bytes = sizes.copy_bytes / 1e9
    return DeviceSpeed(
        matmul_tflop_per_s=2 * sizes.matmul**3 / product_s / 1e12,
        memory_gb_per_s=2 * num_bytes / copy_s,  # each byte is read and written
        to_device_gb_per_s=None if there_s is None else num_bytes / there_s,
        from_device_gb_per_s=None if back_s is None else num_bytes / back_s,
    )


def _time(work: Callable[[], object], device: Any) -> float:  # noqa: ANN401  # torch.device
    """Return the seconds of some work: on a GPU the median, under sustained load.

    On processors it is the shortest: what else runs there only adds time.
    """
    import torch

    def once() -> float:
        begun_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun_s

    once()
    times = sorted(once() for _ in range(NUM_TIMES))
    return times[NUM_TIMES // 2] if device.type == "cuda" else times[0]


def measure_loopback() -> float:
    """Return the bandwidth of a TCP connection of this host to itself, GB/s."""

    def receive(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            while connection.recv(CHUNK_BYTES):
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=receive, args=(server,), daemon=True)
        thread.start()
        chunk = bytes(CHUNK_BYTES)
        begun_s = time.perf_counter()
        with socket.create_connection(server.getsockname()) as client:
            for _ in range(LOOPBACK_BYTES // CHUNK_BYTES):
                client.sendall(chunk)
        thread.join()
    return LOOPBACK_BYTES / (time.perf_counter() - begun_s) / 1e9


class Collectives:
    """All-reduce and all-to-all of a group, timed on this rank."""

    def __init__(self, device: Any) -> None:  # noqa: ANN401  # torch.device
        self._device = device
        self._sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES

    def all_reduce(self, group: Any, num_ranks: int) -> float:  # noqa: ANN401  # a process group
        """Return the seconds of one byte over the bus in an all-reduce, times 1e9."""
        import torch
        from torch import distributed as dist

        buffer = torch.ones(self._sizes.collective_bytes // 4, device=self._device)
        seconds = self._median(lambda: dist.all_reduce(buffer, group=group), group)
        return seconds / (2 * (num_ranks - 1) / num_ranks) / self._sizes.collective_bytes * 1e9

    def all_to_all(self, group: Any, num_ranks: int) -> float:  # noqa: ANN401  # a process group
        """Return the same for an all-to-all.

        Source: nccl-tests, PERFORMANCE.md: the bandwidth of the bus does not depend on the number
        of ranks, so that groups of unlike sizes can be compared.
        """
        import torch
        from torch import distributed as dist

        num = self._sizes.collective_bytes // 4 // num_ranks * num_ranks
        source = torch.ones(num, device=self._device)
        target = torch.empty_like(source)
        work = lambda: dist.all_to_all_single(target, source, group=group)  # noqa: E731
        seconds = self._median(work, group)
        return seconds / ((num_ranks - 1) / num_ranks) / (4 * num) * 1e9

    def _median(self, work: Callable[[], object], group: Any) -> float:  # noqa: ANN401
        import torch
        from torch import distributed as dist

        def once() -> float:
            if self._device.type == "cuda":
                dist.barrier(group=group, device_ids=[self._device.index])
                torch.cuda.synchronize(self._device)
            else:
                dist.barrier(group=group)
            begun_s = time.perf_counter()
            work()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            return time.perf_counter() - begun_s

        once()
        return sorted(once() for _ in range(NUM_COLLECTIVES))[NUM_COLLECTIVES // 2]
