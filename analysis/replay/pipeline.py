"""Pipeline schedules with other numbers of stages, chunks and micro-batches.

The compute of a micro-batch and the transfer between stages are those that were recorded, divided
equally among the stages if their number changes; what a step takes beside its pipeline (gradients,
optimizer, input) stays as recorded. So the result says what the schedule gives and nothing about
another tensor-parallel size, memory, or a network that many more stages would load.

Source: 1F1B and its interleaved form as Narayanan et al., arXiv 2104.04473, section 2.2; with equal
stages and free transfers their bubbles are ``(p - 1) / m`` and ``(p - 1) / (v m)`` of the compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KINDS, SpanKind

from ..trace.errors import AnalysisError
from .step_graph import longest_paths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from .model import Reading

FORWARD, BACKWARD = (KINDS.index(kind) for kind in (SpanKind.FORWARD, SpanKind.BACKWARD))


class ScheduleError(AnalysisError):
    """A schedule that does not exist, or a run whose pipeline is unknown."""


class Schedule(StrEnum):
    """Order of the forwards and backwards of a stage."""

    GPIPE = "gpipe"
    """All forwards, then all backwards."""

    ONE_F_ONE_B = "1f1b"
    """As few forwards as the stages after it need, then one forward and one backward in turn; with
    several chunks a stage, interleaved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The pipeline of a run, measured."""

    compute_ns: NDArray[np.float64]
    """Shape (2, chunks, stages): mean forward and backward of a micro-batch."""

    send_ns: float | None
    """Median transfer between two stages; None with one stage, whose transfers are unknown."""

    num_microbatches: int
    step_ns: float
    """Mean step of the full replay."""

    rest_ns: float
    """What it takes beside the pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A step with another pipeline."""

    schedule: Schedule
    stages: int
    chunks: int
    microbatches: int
    step_ns: float
    bubble_ratio: float
    """Time in which the average stage waits, over its compute."""

    speedup: float
    """Of tokens per second and device, and so of MFU, over the run as recorded."""


def measure_pipeline(reading: Reading, step_ns: float) -> Pipeline:
    """Measure the pipeline of a run, which is taken for a 1F1B schedule.

    Args:
        step_ns: Mean step of the full replay.

    Raises:
        ScheduleError: The steps have different numbers of micro-batches, or take less time than a
            1F1B schedule of their compute.
    """
    items, model = reading.items, reading.model
    stage_of = np.zeros(int(model.rank.max(initial=0)) + 1, dtype=np.int64)
    stage_of[model.rank] = model.stage
    is_pass = np.isin(items.kind, (FORWARD, BACKWARD))
    stage, chunk = stage_of[items.rank[is_pass]], np.maximum(items.chunk[is_pass], 0)
    kind, took_ns = (items.kind[is_pass] == BACKWARD).astype(np.int64), items.self_ns[is_pass]
    shape = (2, int(chunk.max(initial=0)) + 1, int(stage.max(initial=0)) + 1)
    cell = np.ravel_multi_index((kind, chunk, stage), shape)
    count = np.bincount(cell, minlength=np.prod(shape))
    counts = set(np.bincount(items.microbatch[is_pass] + 1)[1:].tolist())
    if not count.all() or len(counts) != 1:
        raise ScheduleError(
            "the pipeline of this run is unknown: its steps have different numbers of forwards and"
            " backwards"
        )
    compute_ns = (np.bincount(cell, weights=took_ns) / count).reshape(shape)
    sends = [link.is_pair for link in reading.transfers.links]
    of_pair = reading.transfers.transfer_ns[np.array(sends, dtype=np.bool_)[reading.transfers.link]]
    pipeline = Pipeline(
        compute_ns=compute_ns,
        send_ns=float(np.median(of_pair)) if len(of_pair) else None,
        num_microbatches=int(items.microbatch[is_pass].max()) + 1,
        step_ns=step_ns,
        rest_ns=0.0,
    )
    _, chunks, stages = shape
    own = plan(pipeline, stages=stages, chunks=chunks, microbatches=pipeline.num_microbatches)
    rest_ns = step_ns - own.step_ns
    if rest_ns < 0:
        raise ScheduleError(
            f"a 1F1B schedule of this run's compute takes {own.step_ns / 1e6:.1f} ms, and its"
            f" steps take {step_ns / 1e6:.1f} ms: it has another schedule"
        )
    return Pipeline(
        compute_ns=compute_ns,
        send_ns=pipeline.send_ns,
        num_microbatches=pipeline.num_microbatches,
        step_ns=step_ns,
        rest_ns=rest_ns,
    )


def plan(
    pipeline: Pipeline,
    *,
    stages: int,
    chunks: int,
    microbatches: int,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
) -> Planned:
    """Return a step of the run with another pipeline.

    Raises:
        ScheduleError: The schedule does not exist, or the transfer between stages is unknown.
    """
    if min(stages, chunks, microbatches) < 1:
        raise ScheduleError("stages, chunks and micro-batches are numbers from 1")
    if chunks > 1 and (stages == 1 or schedule is Schedule.GPIPE or microbatches % stages):
        raise ScheduleError(
            f"{chunks} chunks a stage need 1F1B, two or more stages, and micro-batches in"
            f" multiples of the {stages} stages, not {microbatches}"
        )
    if stages > 1 and pipeline.send_ns is None:
        raise ScheduleError("this run has one stage, so the transfer between stages is unknown")
    recorded = pipeline.compute_ns
    compute_ns = recorded
    if recorded.shape != (2, chunks, stages):
        whole_ns = recorded.sum(axis=(1, 2), keepdims=True)
        compute_ns = np.broadcast_to(whole_ns / (chunks * stages), (2, chunks, stages))
    pipeline_ns = _replay(compute_ns, pipeline.send_ns or 0.0, microbatches, schedule)
    step_ns = pipeline_ns + pipeline.rest_ns
    busy_ns = microbatches * float(compute_ns.sum()) / stages
    work = microbatches / stages
    recorded_work = pipeline.num_microbatches / recorded.shape[2]
    return Planned(
        schedule=schedule,
        stages=stages,
        chunks=chunks,
        microbatches=microbatches,
        step_ns=step_ns,
        bubble_ratio=pipeline_ns / busy_ns - 1.0,
        speedup=(work / step_ns) / (recorded_work / pipeline.step_ns),
    )


def _replay(
    compute_ns: NDArray[np.float64], send_ns: float, num_microbatches: int, schedule: Schedule
) -> float:
    """Return the time from the first forward to the last backward, ns.

    The nodes are the passes (kind, chunk, stage, micro-batch), and the transfer after each.
    """
    _, num_chunks, num_stages = compute_ns.shape
    shape = (2, num_chunks, num_stages, num_microbatches)
    number = np.arange(np.prod(shape)).reshape(shape)
    num = number.size
    # Stages in the order of a forward: all of the first chunk, then all of the second.
    forward, backward = number.reshape(2, -1, num_microbatches)
    src, dst = [number.ravel()], [num + number.ravel()]  # to its own transfer
    src += [num + forward[:-1].ravel(), num + backward[1:].ravel(), forward[-1]]
    dst += [forward[1:].ravel(), backward[:-1].ravel(), backward[-1]]
    for stage in range(num_stages):
        order = _order(num_stages, num_chunks, num_microbatches, stage, schedule)
        kind, chunk, microbatch = np.array(list(order)).T
        own = number[kind, chunk, stage, microbatch]
        src.append(own[:-1])
        dst.append(own[1:])
    took_ns = np.broadcast_to(compute_ns[..., None], shape).ravel()
    lengths = np.append(took_ns, np.full(num, send_ns))
    ends = longest_paths(2 * num, (np.concatenate(src), np.concatenate(dst)), lengths)
    return float(ends[:num].max())


def _order(
    num_stages: int, num_chunks: int, num_microbatches: int, stage: int, schedule: Schedule
) -> Iterator[tuple[int, int, int]]:
    """Yield kind (0 forward, 1 backward), chunk and micro-batch of a stage's passes, in order."""
    total = num_microbatches * num_chunks
    ahead = num_stages - stage - 1
    if num_chunks > 1:
        ahead = 2 * ahead + (num_chunks - 1) * num_stages
    if schedule is Schedule.GPIPE:
        ahead = total
    round_size = num_stages * num_chunks

    def passed(kind: int, index: int) -> tuple[int, int, int]:
        if num_chunks == 1:
            return kind, 0, index
        rounds, place = divmod(index, round_size)
        chunk, within = divmod(place, num_stages)
        return kind, num_chunks - 1 - chunk if kind else chunk, rounds * num_stages + within

    done = min(ahead, total)
    yield from (passed(0, index) for index in range(done))
    for index in range(total - done):
        yield passed(0, done + index)
        yield passed(1, index)
    yield from (passed(1, index) for index in range(total - done, total))
