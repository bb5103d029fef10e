"""Run one step: each stage's work in order, all its ranks at once.

Times are ns from the run's start, on the true clock. A collective ends for its
members a transfer after the last of them entered; a receive ends a transfer
after both sides are there; sends go out in the background.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracer.span import SpanFlag, SpanKind
from trainer.simulator.chance import ItemNoise, Purpose, stream
from trainer.simulator.cluster import NS_PER_MS
from trainer.simulator.fault import SimulatedCause, Trace
from trainer.simulator.groups import KIND_OF_AXIS, Axis
from trainer.simulator.recorder import NEVER, ON_DEVICE, ON_HOST, Label, Recorder
from trainer.simulator.scenario import TpDetail
from trainer.simulator.schedule import receiver_of, sender_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trainer.simulator.cluster import Cluster, Sync
    from trainer.simulator.effects import StepEffects
    from trainer.simulator.lengths import Lengths
    from trainer.simulator.schedule import Slot
    from trainer.simulator.sequence import SequenceNumbers

    Times = NDArray[np.int64]

MAIN = "main"
TRACKS = {axis: f"comm {axis.name.lower()}" for axis in Axis}
GRAD_NORM_BYTES = 4
SPAN_AXES = {Axis.TP: (2,), Axis.CP: (1,), Axis.DP: (0, 1)}
"""Axes of a stage's (dp, cp, tp) times over which a group's members lie."""

PAUSE_JITTER = 0.2
"""Standard deviation of the logarithm of a pause of garbage collection."""


@dataclass(frozen=True, slots=True)
class _Message:
    """An activation or gradient on its way between two stages."""

    sent: Times
    dst_stage: int


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Gradients whose reduction was launched and not yet waited for."""

    label: Label
    end: Times


class StepRun:
    """One step of a cluster.

    Args:
        cluster: What stays the same.
        step: Its number.
        start: Shape (pp, dp, cp, tp): when each rank begins it.
        effects: What the faults do in it.
        lengths: What the micro-batches hold.
        seqs: Sequence numbers, counted on over the steps.
    """

    def __init__(
        self,
        cluster: Cluster,
        step: int,
        *,
        start: Times,
        effects: StepEffects,
        lengths: Lengths,
        seqs: SequenceNumbers,
    ) -> None:
        self._cluster = cluster
        self._scenario = cluster.scenario
        self._step = step
        self._effects = effects
        self._lengths = lengths
        self._seqs = seqs
        self._noise = ItemNoise(
            cluster.scenario.noise, stream(cluster.scenario.seed, Purpose.ITEMS, step)
        )
        self._pauses = [
            (fault, stream(cluster.scenario.seed, Purpose.PAUSES, number, step))
            for number, fault in effects.pauses
        ]
        self._now: list[Times] = list(start)
        self._shape = start.shape[1:]
        self._messages: dict[Slot, _Message] = {}
        self._buckets: list[list[_Bucket]] = [[] for _ in self._now]
        self._streams: list[Times] = list(start)
        self._scale = cluster.bias * effects.compute_factor * self._drift()
        self.recorder = Recorder(cluster.placement, cluster.groups)
        self.stopped_at = NEVER
        """When the rank of a crash or hang stopped."""

    def run(self) -> Times:
        """Run the step; return when each rank ends it, shape (pp, dp, cp, tp)."""
        stages = range(self._scenario.pp)
        for stage in stages:
            self._read_data(stage)
        last_of_chunk = self._last_backwards()
        for slot in self._cluster.order:
            self._receive(slot)
            begin, end = self._compute(slot)
            self._send(slot)
            if slot in last_of_chunk and self._scenario.overlap:
                self._launch_buckets(slot, begin, end)
        for stage in stages:
            self._reduce_gradients(stage)
        self._reduce_norm()
        for stage in stages:
            self._optimize(stage)
            self._data_parallel(stage, "all_gather_into_tensor")
            self._checkpoint(stage)
        return np.stack(self._now)

    def _drift(self) -> float:
        noise = self._scenario.noise
        turn = 2 * np.pi * self._step / max(1, noise.drift_period_steps)
        return float(1 + noise.drift_ratio * np.sin(turn))

    def _last_backwards(self) -> frozenset[Slot]:
        last = {
            (slot.stage, slot.chunk): slot for slot in self._cluster.order if not slot.is_forward
        }
        return frozenset(last.values())

    def _read_data(self, stage: int) -> None:
        start = self._now[stage]
        mean_ns = self._filled(self._scenario.data_ms * NS_PER_MS)
        end = start + self._noise.compute_ns(mean_ns) + self._effects.data_span_ns[stage]
        if (end > start).any():
            label = Label(kind=SpanKind.DATA, name="data", track=MAIN, flags=ON_HOST)
            self.recorder.add(stage, label, start, end)
        self._now[stage] = end + self._effects.data_gap_ns[stage]

    def _receive(self, slot: Slot) -> None:
        sender = sender_of(slot, pp=self._scenario.pp, vpp=self._scenario.vpp)
        if sender is None or sender.stage == slot.stage:
            return
        message = self._messages.pop(sender)
        stage, start = slot.stage, self._now[slot.stage]
        transfer = self._noise.transfer_ns(self._effects.links.p2p_ns(sender.stage, stage))
        done = np.maximum(message.sent, start) + transfer
        sent = {
            "track": TRACKS[Axis.PP],
            "axis": Axis.PP,
            "seq": self._seqs.of_pair(sender.stage, stage),
            "src_stage": sender.stage,
            "dst_stage": stage,
        }
        common = sent | {"num_bytes": self._scenario.activation_bytes}
        self.recorder.add(
            sender.stage,
            Label(
                kind=SpanKind.PP_SEND,
                name="send",
                microbatch=sender.microbatch,
                chunk=sender.chunk,
                flags=ON_DEVICE | SpanFlag.ASYNC,
                **common,  # type: ignore[arg-type]
            ),
            message.sent,
            done + self._noise.end_ns(self._shape),
        )
        end = done + self._noise.end_ns(self._shape)
        places = {"microbatch": slot.microbatch, "chunk": slot.chunk}
        self.recorder.add(
            stage,
            Label(kind=SpanKind.PP_RECV, name="recv", **common, **places),  # type: ignore[arg-type]
            start,
            end,
        )
        self.recorder.add(
            stage,
            Label(
                kind=SpanKind.WAIT,
                name="wait recv",
                flags=ON_HOST,
                depth=1,
                **(sent | places | {"track": MAIN}),  # type: ignore[arg-type]
            ),
            start,
            end,
        )
        self._now[stage] = end

    def _send(self, slot: Slot) -> None:
        receiver = receiver_of(slot, pp=self._scenario.pp, vpp=self._scenario.vpp)
        if receiver is not None and receiver.stage != slot.stage:
            self._messages[slot] = _Message(self._now[slot.stage], receiver.stage)

    def _compute(self, slot: Slot) -> tuple[Times, Times]:
        """Run one forward or backward; return when it began and ended."""
        stage = slot.stage
        ready = self._now[stage] + self._effects.gap_ns[stage]
        ready = ready + self._noise.launch_gap_ns(self._shape)
        if slot.is_forward:
            ready = self._pause(stage, ready)
        begin, stall = self._stop(slot, ready)
        forward_ms, backward_ms = self._cluster.compute_ms(stage)
        mean_ms = forward_ms if slot.is_forward else backward_ms
        length = self._lengths.factor[slot.microbatch][:, None, None]
        own = self._noise.compute_ns(mean_ms * NS_PER_MS * self._scale[stage] * length)
        kind = SpanKind.FORWARD if slot.is_forward else SpanKind.BACKWARD
        label = Label(
            kind=kind, name=kind.value, track=MAIN, microbatch=slot.microbatch, chunk=slot.chunk
        )
        now = begin if stall is None else begin + stall
        syncs = self._cluster.syncs
        if self._scenario.tp_detail is not TpDetail.COLLAPSED:
            for number, sync in enumerate(syncs):
                piece = own * (number + 1) // len(syncs) - own * number // len(syncs)
                now = self._sync(slot, sync, now + piece)
            end = now if syncs else now + own
        else:
            end = self._meet_unseen(stage, now + own)
        self.recorder.add(stage, label, begin, end)
        self._now[stage] = end
        return begin, end

    def _sync(self, slot: Slot, sync: Sync, start: Times) -> Times:
        """Meet in one collective inside a compute span; return when each member leaves."""
        label = Label(
            kind=KIND_OF_AXIS[sync.axis],
            name=sync.name,
            track=TRACKS[sync.axis],
            axis=sync.axis,
            seq=self._seqs.of_group(sync.axis, slot.stage),
            microbatch=slot.microbatch,
            chunk=slot.chunk,
            num_bytes=sync.num_bytes,
            depth=1,
        )
        mean_ns = self._effects.links.collective_ns(
            sync.axis, num_bytes=sync.num_bytes, passes=sync.passes
        )[slot.stage]
        end = self._meet(sync.axis, start, mean_ns)
        self._blocked(slot.stage, label, start, end)
        return end

    def _meet_unseen(self, stage: int, start: Times) -> Times:
        """Return when partners leave a compute span whose collectives are not recorded."""
        end = start
        for sync in self._cluster.syncs:
            mean_ns = self._effects.links.collective_ns(
                sync.axis, num_bytes=sync.num_bytes, passes=sync.passes
            )
            arrival = end.max(axis=SPAN_AXES[sync.axis], keepdims=True)
            left = arrival + self._noise.transfer_ns(mean_ns[stage])
            end = np.broadcast_to(left, self._shape)
        return end

    def _meet(self, axis: Axis, start: Times, mean_ns: NDArray[np.float64]) -> Times:
        """Return when each member leaves a collective that all of its group enter."""
        arrival = start.max(axis=SPAN_AXES[axis], keepdims=True)
        transfer = self._noise.transfer_ns(mean_ns)
        left: Times = arrival + transfer + self._noise.end_ns(self._shape)
        return left

    def _blocked(self, stage: int, label: Label, start: Times, end: Times) -> None:
        """Record a communication that its rank waited for, and the wait."""
        self.recorder.add(stage, label, start, end)
        self.recorder.add(stage, wait_label(label), start, end)

    def _pause(self, stage: int, ready: Times) -> Times:
        """Stop random ranks for a collection of garbage."""
        for fault, rng in self._pauses:
            hit = rng.random(self._shape) < fault.probability
            pause = fault.extra_ns * np.exp(PAUSE_JITTER * rng.standard_normal(self._shape))
            after = ready + np.where(hit, pause, 0).astype(np.int64)
            if hit.any() and fault.trace is Trace.SPANS:
                label = Label(kind=SpanKind.GC, name="gc generation 2", track=MAIN, flags=ON_HOST)
                rank = self._cluster.placement.rank[stage][hit]
                self.recorder.add_some(label, rank, ready[hit], after[hit])
            ready = after
        return ready

    def _stop(self, slot: Slot, ready: Times) -> tuple[Times, Times | None]:
        """Let the rank of a crash or hang go no further.

        Returns:
            When the slot begins, and how much longer it takes: a rank that hangs
            never begins it, one that dies never ends it.
        """
        ending = self._effects.ending
        if ending is None or not self._is_stopping_place(slot):
            return ready, None
        here = self._cluster.placement.rank[slot.stage] == ending.ranks[0]
        if not here.any():
            return ready, None
        stall = np.where(here, NEVER, 0)
        at = int(ready[here][0])
        if ending.cause is SimulatedCause.HANG:
            self.stopped_at = at
            return ready + stall, None
        self.stopped_at = at + round(self._scenario.forward_ms * NS_PER_MS / 2)
        return ready, stall

    def _is_stopping_place(self, slot: Slot) -> bool:
        middle = self._scenario.num_microbatches // 2
        return slot.is_forward and slot.chunk == 0 and slot.microbatch == middle

    def _launch_buckets(self, slot: Slot, begin: Times, end: Times) -> None:
        """Launch the reductions of a chunk's gradients while its last backward runs."""
        if self._scenario.dp * self._scenario.cp == 1:
            return
        stage, num = slot.stage, self._scenario.num_buckets
        num_bytes = self._scenario.gradient_bytes // (num * self._scenario.vpp)
        mean_ns = self._effects.links.collective_ns(Axis.DP, num_bytes=num_bytes, passes=1)[stage]
        for number in range(num):
            label = Label(
                kind=SpanKind.DP_COMM,
                name="reduce_scatter_tensor",
                track=TRACKS[Axis.DP],
                axis=Axis.DP,
                seq=self._seqs.of_group(Axis.DP, stage),
                chunk=slot.chunk,
                num_bytes=num_bytes,
                flags=ON_DEVICE | SpanFlag.ASYNC,
            )
            launch = begin + (end - begin) // num * (number + 1)
            start = np.maximum(launch + self._effects.skew_ns[stage], self._streams[stage])
            done = self._meet(Axis.DP, start, mean_ns)
            self.recorder.add(stage, label, start, done, launch=launch)
            self._streams[stage] = done
            self._buckets[stage].append(_Bucket(label, done))

    def _reduce_gradients(self, stage: int) -> None:
        if not self._scenario.overlap:
            self._now[stage] = self._now[stage] + self._effects.skew_ns[stage]
            self._data_parallel(stage, "reduce_scatter_tensor")
            return
        for bucket in self._buckets[stage]:
            start = self._now[stage]
            end = np.maximum(start, bucket.end)
            self.recorder.add(stage, wait_label(bucket.label), start, end)
            self._now[stage] = end

    def _data_parallel(self, stage: int, name: str) -> None:
        """Scatter the gradients or gather the parameters of a stage, and wait for it."""
        if self._scenario.dp * self._scenario.cp == 1:
            return
        num_bytes = self._scenario.gradient_bytes
        label = Label(
            kind=SpanKind.DP_COMM,
            name=name,
            track=TRACKS[Axis.DP],
            axis=Axis.DP,
            seq=self._seqs.of_group(Axis.DP, stage),
            num_bytes=num_bytes,
        )
        mean_ns = self._effects.links.collective_ns(Axis.DP, num_bytes=num_bytes, passes=1)[stage]
        start = self._now[stage]
        end = self._meet(Axis.DP, start, mean_ns)
        self._blocked(stage, label, start, end)
        self._now[stage] = end

    def _reduce_norm(self) -> None:
        """Sum the gradients' norm over the whole job."""
        if self._scenario.world_size == 1:
            return
        label = Label(
            kind=SpanKind.OTHER,
            name="all_reduce",
            track=TRACKS[Axis.WORLD],
            axis=Axis.WORLD,
            seq=self._seqs.of_group(Axis.WORLD, 0),
            num_bytes=GRAD_NORM_BYTES,
        )
        mean_ns = self._effects.links.collective_ns(Axis.WORLD, num_bytes=GRAD_NORM_BYTES, passes=2)
        arrival = max(int(now.max()) for now in self._now)
        left = arrival + int(self._noise.transfer_ns(mean_ns).max())
        for stage, start in enumerate(self._now):
            end = left + self._noise.end_ns(self._shape)
            self._blocked(stage, label, start, end)
            self._now[stage] = end

    def _optimize(self, stage: int) -> None:
        begin = self._now[stage] + self._effects.gap_ns[stage]
        begin = begin + self._noise.launch_gap_ns(self._shape)
        mean_ns = self._scenario.optimizer_ms * NS_PER_MS * self._scale[stage]
        end = begin + self._noise.compute_ns(mean_ns)
        label = Label(kind=SpanKind.OPTIMIZER, name="optimizer", track=MAIN)
        self.recorder.add(stage, label, begin, end)
        self._now[stage] = end

    def _checkpoint(self, stage: int) -> None:
        if not self._effects.checkpoint_ns:
            return
        begin = self._now[stage]
        end = begin + self._noise.compute_ns(self._filled(self._effects.checkpoint_ns))
        if self._effects.checkpoint_trace is Trace.SPANS:
            label = Label(kind=SpanKind.CHECKPOINT, name="checkpoint", track=MAIN, flags=ON_HOST)
            self.recorder.add(stage, label, begin, end)
        self._now[stage] = end

    def _filled(self, value: float) -> NDArray[np.float64]:
        return np.full(self._shape, value)


def wait_label(label: Label) -> Label:
    """Return the label of a thread's wait for the communication that ``label`` names."""
    return Label(
        kind=SpanKind.WAIT,
        name=f"wait {label.name}",
        track=MAIN,
        axis=label.axis,
        seq=label.seq,
        microbatch=label.microbatch,
        chunk=label.chunk,
        flags=ON_HOST,
        depth=label.depth + 1,
    )
