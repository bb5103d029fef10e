"""Means of what a profile's import stored of the device: parts of the steps, and kernels."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import NS_PER_S

from ..report.device_time import DeviceTime, Kernel
from ..trace.device_peaks import memory_bytes_per_s, peak_flops_per_s

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ..trace.context import KernelRecord, RunContext

DEVICE_TIME = "device-time"
"""Kind of the events that have the parts of one step."""

OTHER = "other"
MAX_KERNELS = 300
"""Kernels of a report, the busiest; the rest of each phase and stream is one more."""

IDLE = "idle, "


def summarize_profile(
    context: RunContext, steps: Collection[int], device_names: Collection[str]
) -> tuple[DeviceTime | None, tuple[Kernel, ...]]:
    """Return the parts of the mean step of each rank on its device, and its kernels.

    Args:
        context: Has them by step.
        steps: Steps that count.
        device_names: Names of the ranks' devices. Peaks are known if there is one.

    Returns:
        None and no kernels if the run is not a profile.
    """
    wanted = frozenset(steps)
    sums: defaultdict[int, Counter[str]] = defaultdict(Counter)
    files: defaultdict[int, Counter[str]] = defaultdict(Counter)
    num_steps: Counter[int] = Counter()
    known: set[int] = set()
    for event in context.events:
        step = event.data.get("step")
        if event.kind != DEVICE_TIME:
            continue
        if step is None:
            files[event.rank].update(_parts(event.data))
        elif step in wanted:
            sums[event.rank].update(_parts(event.data))
            num_steps[event.rank] += 1
            known.add(step)
    if not sums:
        return None, ()
    ranks = sorted(sums)
    parts = sorted({part for rank in ranks for part in (*sums[rank], *files[rank])}, key=_order)
    mean_ns = [[sums[rank][part] / num_steps[rank] for part in parts] for rank in ranks]
    file_ns = [[files[rank][part] for part in parts] for rank in ranks]
    device_time = DeviceTime(
        parts=tuple(parts),
        steps=tuple(sorted(known)),
        ranks=tuple(ranks),
        by_rank_s=np.array(mean_ns) / NS_PER_S,
        file_by_rank_s=np.array(file_ns) / NS_PER_S if all(map(any, file_ns)) else None,
    )
    return device_time, average_kernels(
        (record for record in context.kernels if record.step in known),
        num_rank_steps=num_steps.total(),
        device_names=device_names,
    )


def _parts(data: Mapping[str, Any]) -> dict[str, int]:
    """Return the parts of one step in ns; what is no number is left out."""
    parts = {"compute": data.get("compute_ns"), "copies": data.get("copy_ns")}
    for group, prefix in (("exposed_ns", "exposed "), ("idle_ns", IDLE)):
        inner = data.get(group)
        if isinstance(inner, dict):
            parts |= {f"{prefix}{name}": length for name, length in inner.items()}
    return {part: length for part, length in parts.items() if type(length) is int}


def _order(part: str) -> tuple[int, str]:
    groups = ("compute", "exposed ", "copies", IDLE)
    return next(at for at, begin in enumerate(groups) if part.startswith(begin)), part


def average_kernels(
    records: Iterable[KernelRecord], *, num_rank_steps: int, device_names: Collection[str]
) -> tuple[Kernel, ...]:
    """Return the kernels of the mean step of a rank, the busiest first.

    Args:
        records: Sums by step.
        num_rank_steps: Number of steps, summed over the ranks.
        device_names: Names of the ranks' devices. Peaks are known if there is one.
    """
    by_key: dict[tuple[str, str, str], list[KernelRecord]] = defaultdict(list)
    for record in records:
        by_key[record.phase, record.stream, record.name].append(record)
    busiest = sorted(by_key.values(), key=lambda own: -sum(each.total_ns for each in own))
    rest: dict[tuple[str, str], list[list[KernelRecord]]] = defaultdict(list)
    for own in busiest[MAX_KERNELS:]:
        rest[own[0].phase, own[0].stream].append(own)
    (device,) = device_names if len(device_names) == 1 else ("",)
    kernels = [_average(own, num_rank_steps, device) for own in busiest[:MAX_KERNELS]]
    for many in rest.values():
        joined = [replace(record, name=OTHER) for own in many for record in own]
        num_names = sum(max(record.num_names for record in own) for own in many)
        kernels.append(replace(_average(joined, num_rank_steps, device), num_names=num_names))
    return tuple(kernels)


def _average(records: list[KernelRecord], num_rank_steps: int, device: str) -> Kernel:
    first = records[0]
    total_ns = sum(record.total_ns for record in records)
    dtypes = {record.dtype for record in records}
    flops = _sum(record.flops for record in records)
    num_bytes = _sum(record.num_bytes for record in records)
    flops_per_s = flops * NS_PER_S / total_ns if flops is not None and total_ns else None
    bytes_per_s = num_bytes * NS_PER_S / total_ns if num_bytes is not None and total_ns else None
    peak = peak_flops_per_s(device, first.dtype) if len(dtypes) == 1 else None
    bandwidth = memory_bytes_per_s(device)
    return Kernel(
        phase=first.phase,
        stream=first.stream,
        name=first.name,
        num=sum(record.num for record in records) / num_rank_steps,
        seconds=total_ns / num_rank_steps / NS_PER_S,
        longest_s=max(record.max_ns for record in records) / NS_PER_S,
        num_names=max(record.num_names for record in records),
        flops_per_s=flops_per_s,
        bytes_per_s=bytes_per_s,
        flops_ratio=flops_per_s / peak if flops_per_s is not None and peak else None,
        bytes_ratio=bytes_per_s / bandwidth if bytes_per_s is not None and bandwidth else None,
    )


def _sum(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total
