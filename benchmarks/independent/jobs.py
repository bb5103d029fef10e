"""A training job on all ranks: launches, compute and communication, step after step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.independent.machine import Instance, Moments, Pending, Rank, Record
from benchmarks.independent.schedule import actions_of
from rankscope.tracer.span import SpanFlag, SpanKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.independent.faults import Plan
    from benchmarks.independent.job import Job
    from benchmarks.independent.layout import Group

US, MS = 1e3, 1e6
FORWARD, BACKWARD = SpanKind.FORWARD, SpanKind.BACKWARD


@dataclass
class Running:
    """A job during its layout in moments."""

    job: Job
    plan: Plan
    moments: Moments = field(default_factory=Moments)
    instances: dict[tuple[object, ...], Instance] = field(default_factory=dict)
    groups: dict[int, dict[int, Group]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.noise = np.random.default_rng((self.job.seed, 1))
        spread = np.random.default_rng((self.job.seed, 2))
        world = self.job.places.world_size
        self.speed = np.exp(spread.normal(0, self.job.rank_spread, world))
        shape = (self.job.num_steps, self.job.places.dp, self.job.num_microbatches)
        self.squares = np.exp(spread.normal(0, self.job.length_spread, shape))
        self.num_steps_ends: dict[int, int] = {}

    def renumber(self, order: Sequence[int]) -> None:
        """Renumber the ranks: rank k becomes ``order[k]``."""
        self.groups = {
            order[rank]: {
                group.group_id: group
                for group in (each.renumbered(order) for each in groups.values())
            }
            for rank, groups in self.groups.items()
        }

    def ranks(self) -> list[Rank]:
        """Lay out the run of every rank."""
        return [Program(self, rank).run() for rank in range(self.job.places.world_size)]


class Program:
    """The run of one rank."""

    def __init__(self, running: Running, rank: int) -> None:
        self.running, self.job, self.plan = running, running.job, running.plan
        self.places = self.job.places
        self.rank = rank
        self.at = self.places.coords(rank)
        self.lane = Rank(rank, running.moments, is_device=self.job.is_device)
        self.lane.as_bounds = self.job.as_bounds
        self.lane.launch_cost_ns = 8 * US if self.job.is_device else 0.0
        self.seqs: dict[tuple[int, int, int], int] = {}
        self.groups: dict[str, Group] = {}
        running.groups[rank] = {}
        self.noise = np.random.default_rng((self.job.seed, 3, rank))
        self.sends: list[Pending] = []
        self.grads: list[Pending] = []
        self.ended: list[int] = []

    # Operations of a rank.

    def _work(self, own_ns: float, factor: float = 1.0) -> None:
        noise = float(np.exp(self.noise.normal(0, self.job.noise)))
        slow = self.plan.compute(self.rank, self.lane.step) * self.running.speed[self.rank]
        warm = self.job.warm_up if self.lane.step == 0 else 1.0
        self.lane.work(own_ns * noise * slow * warm * factor)

    def _group(self, axis: str) -> Group:
        if axis not in self.groups:
            self.groups[axis] = self.places.group(axis, self.rank)
            self.running.groups[self.rank][self.groups[axis].group_id] = self.groups[axis]
        return self.groups[axis]

    def _transfer_ns(self, members: tuple[int, ...], num_bytes: int, *, crosses: bool) -> float:
        rate, latency = (25.0, 20 * US) if crosses else (200.0, 8 * US)
        share = 2 * (len(members) - 1) / len(members) if len(members) > 2 else 1.0
        usual = latency + num_bytes * share / rate
        usual *= float(np.exp(self.running.noise.normal(0, self.job.link_noise)))
        step = self.lane.step
        return usual * self.plan.transfer(members, crosses=crosses, step=step)

    def _enter(
        self, group: Group, name: str, num_bytes: int, *, start: int, pair: tuple[int, int] | None
    ) -> tuple[int, int]:
        """Start a communication; return its number and its end on this rank."""
        key = (group.group_id, *(pair or (-1, -1)))
        seq = self.seqs.get(key, 0)
        self.seqs[key] = seq + 1
        members = tuple(sorted(pair)) if pair else group.members
        instance = self.running.instances.get((*key, seq))
        if instance is None:
            own = self._transfer_ns(members, num_bytes, crosses=self.places.crosses(members))
            instance = Instance(self.running.moments.add(own))
            self.running.instances[(*key, seq)] = instance
        before = [instance.done]
        if self.job.eager_sends and pair is not None and self.rank == pair[1]:
            before.append(start)
        else:
            self.running.moments.follow(start, instance.done)
        end = self.running.moments.add(self.noise.exponential(3 * US), *before)
        instance.ends[self.rank] = end
        del name
        return seq, end

    def _collective(
        self,
        axis: str,
        name: str,
        num_bytes: int,
        *,
        is_async: bool,
        p2p: tuple[int, int] | None = None,
    ) -> Pending:
        group, lane = self._group(axis), self.lane
        launched = lane.launch()
        mark = self.running.moments.add(0, lane.stream, launched)
        stream = f"{axis}{p2p or ''}"
        before = lane.busy_until.get(stream)
        start = self.running.moments.add(0, mark, before) if is_async else mark
        seq, end = self._enter(group, name, num_bytes, start=start, pair=p2p)
        kind = SpanKind(group.kind)
        if axis == "pp" and p2p is not None:
            kind = SpanKind.PP_SEND if self.rank == p2p[0] else SpanKind.PP_RECV
        record = Record(
            kind, name, lane.step, start, end, launched if lane.is_device else start, stream,
            lane.flags | (SpanFlag.ASYNC if is_async else 0), group_id=group.group_id, seq=seq,
            src=p2p[0] if p2p else -1, dst=p2p[1] if p2p else -1, num_bytes=num_bytes,
        )  # fmt: skip
        if is_async:
            record.marks = [mark, -1 if before is None else before, -1, -1]
            lane.busy_until[stream] = end
        is_untraced = axis == "tp" and not self.job.tp_traced
        if not is_untraced:
            lane.records.append(record)
        return Pending(record, end)

    def _sync(self, axis: str, name: str, num_bytes: int) -> None:
        pending = self._collective(axis, name, num_bytes, is_async=False)
        is_recorded = self.job.records_waits and not self.job.is_device
        self.lane.wait(pending, recorded=is_recorded and (axis != "tp" or self.job.tp_traced))

    def _wait(self, pending: Pending) -> None:
        self.lane.wait(pending, recorded=self.job.records_waits)

    def _host_span(self, kind: SpanKind, name: str, own_ns: float) -> None:
        start, end = self.lane.host_time(own_ns)
        self.lane.records.append(
            Record(kind, name, self.lane.step, start, end, start, "host", int(SpanFlag.HOST_CLOCK))
        )

    # Steps.

    def run(self) -> Rank:
        """Lay out the run."""
        for step in range(self.job.num_steps):
            self.lane.step = step
            self._step(step)
        return self.lane

    def _step(self, step: int) -> None:
        lane, job = self.lane, self.job
        if job.is_device and len(self.ended) >= 2 and not job.synchronised:
            lane.sync_to(self.ended[-2])
        began = lane.host
        self._input(step)
        for is_forward, microbatch, chunk in actions_of(
            self.at.pp, self.places.pp, job.num_microbatches, self.places.vpp
        ):
            (self._forward if is_forward else self._backward)(step, microbatch, chunk)
        self._finish(step)
        self.ended.append(lane.stream)
        if job.is_device and job.synchronised:
            lane.sync_to(lane.stream)
        if job.checkpoint_every and step % job.checkpoint_every == job.checkpoint_every - 1:
            self._checkpoint()
        if job.evaluate_every and step % job.evaluate_every == job.evaluate_every - 1:
            lane.host_time(4 * job.num_layers * job.layer_ms * MS * job.num_microbatches)
        lane.steps.append((step, began, lane.host))

    def _input(self, step: int) -> None:
        late = self.plan.input_ns(self.rank, step)
        has_spans = all(each.has_spans for each in self.plan.faults if each.how == "data")
        if has_spans:
            self._host_span(SpanKind.DATA, "next batch", 1.5 * MS + late)
        else:
            self.lane.host_time(1.5 * MS + late)
        for microbatch in range(self.job.num_microbatches):
            squares = self.running.squares[step, self.at.dp, microbatch] * 4096**2
            known = int(squares) if self.job.records_lengths else -1
            self.lane.microbatches.append((step, microbatch, self.lane.host, 8192, known))

    def _host_before(self, step: int, *, is_forward: bool) -> None:
        stalled = self.plan.before_launch_ns(self.rank, step)
        if stalled:
            self.lane.host_time(stalled)
        if is_forward:
            pause, has_spans = self.plan.pause_ns(self.rank, step)
            if pause and has_spans:
                self._host_span(SpanKind.GC, "gc", pause)
            elif pause:
                self.lane.host_time(pause)

    def _peer(self, chunk: int, *, ahead: bool) -> int | None:
        """Return the rank with the next or previous part of the model."""
        part = chunk * self.places.pp + self.at.pp + (1 if ahead else -1)
        if not 0 <= part < self.places.pp * self.places.vpp:
            return None
        at = self.at
        return self.places.rank_at(dp=at.dp, tp=at.tp, pp=part % self.places.pp, cp=at.cp)

    def _length(self, step: int, microbatch: int) -> float:
        return float(0.5 + 0.5 * self.running.squares[step, self.at.dp, microbatch])

    def _receive(self, peer: int | None, name: str) -> None:
        if peer is not None:
            self._wait(self._collective("pp", name, 16 << 20, is_async=True, p2p=(peer, self.rank)))

    def _send(self, peer: int | None, name: str) -> None:
        if peer is not None:
            self.sends.append(
                self._collective("pp", name, 16 << 20, is_async=True, p2p=(self.rank, peer))
            )

    def _forward(self, step: int, microbatch: int, chunk: int) -> None:
        self._host_before(step, is_forward=True)
        self._receive(self._peer(chunk, ahead=False), "recv_forward")
        gathered = self._gather() if self.job.sharded else None
        self.lane.begin(FORWARD, "forward", microbatch, chunk)
        for layer in range(self.job.num_layers):
            if gathered is not None:
                following = self._gather() if layer + 1 < self.job.num_layers else None
                self._wait(gathered)
                gathered = following
            self._layer(step, microbatch, 1.0)
        if self._is_head(chunk):
            self._work((self.job.last_stage - 1) * self.job.num_layers * self.job.layer_ms * MS)
        self.lane.end()
        self._send(self._peer(chunk, ahead=True), "send_forward")

    def _is_head(self, chunk: int) -> bool:
        last = self.at.pp == self.places.pp - 1 and chunk == self.places.vpp - 1
        return last and self.job.last_stage > 1

    def _backward(self, step: int, microbatch: int, chunk: int) -> None:
        self._host_before(step, is_forward=False)
        self._receive(self._peer(chunk, ahead=True), "recv_backward")
        gathered = self._gather() if self.job.sharded else None
        self.lane.begin(BACKWARD, "backward", microbatch, chunk)
        if self._is_head(chunk):
            self._work((self.job.last_stage - 1) * self.job.num_layers * 2 * self.job.layer_ms * MS)
        is_last = microbatch == self.job.num_microbatches - 1 and self.places.pp == 1
        for layer in range(self.job.num_layers):
            if gathered is not None:
                following = self._gather() if layer + 1 < self.job.num_layers else None
                self._wait(gathered)
                gathered = following
            self._layer(step, microbatch, 2.0)
            if self.job.sharded:
                self._reduce("reduce_scatter")
            elif is_last and self._has_replicas() and layer + 1 < self.job.num_layers:
                self._reduce("all_reduce")
        self.lane.end()
        if is_last and self._has_replicas() and not self.job.sharded:
            self._before_reduce(step)
            self._reduce("all_reduce")
        self._send(self._peer(chunk, ahead=False), "send_backward")

    def _has_replicas(self) -> bool:
        return self.places.dp * self.places.cp > 1

    def _layer(self, step: int, microbatch: int, share: float) -> None:
        own = self.job.layer_ms * MS * share * self._length(step, microbatch)
        places = self.places
        if places.cp > 1:
            self._ring(own * 0.6, share)
            own *= 0.4
        if places.tp > 1:
            self._work(own * 0.45)
            self._sync("tp", "all_reduce", 32 << 20)
            own *= 0.55
        if places.ep > 1:
            routed = float(np.exp(self.noise.normal(0, self.job.routing_noise)))
            routed *= self.plan.experts(self.rank, step)
            self._work(own * (1 - self.job.expert_share))
            self._sync("ep", "all_to_all", 24 << 20)
            self._work(own * self.job.expert_share, routed)
            self._sync("ep", "all_to_all", 24 << 20)
        else:
            self._work(own)
        if places.tp > 1:
            self._sync("tp", "all_reduce", 32 << 20)

    def _ring(self, own_ns: float, share: float) -> None:
        """Attend to a part of the context while the next one is received."""
        group = self._group("cp").members
        here = group.index(self.rank)
        after, before = group[(here + 1) % len(group)], group[here - 1]
        num_bytes = int(8 * share) << 20
        for turn in range(len(group)):
            pending = []
            if turn + 1 < len(group):
                pending = [
                    self._collective(
                        "cp", "send", num_bytes, is_async=True, p2p=(self.rank, after)
                    ),
                    self._collective(
                        "cp", "recv", num_bytes, is_async=True, p2p=(before, self.rank)
                    ),
                ]
            self._work(own_ns / len(group))
            for each in pending:
                self._wait(each)

    def _gather(self) -> Pending:
        return self._collective("dp_cp", "all_gather", 48 << 20, is_async=True)

    def _reduce(self, name: str) -> None:
        self.grads.append(self._collective("dp_cp", name, 96 << 20, is_async=True))

    def _before_reduce(self, step: int) -> None:
        late = self.plan.before_reduce_ns(self.rank, step)
        if late:
            self.lane.host_time(late)

    def _finish(self, step: int) -> None:
        for each in self.sends:
            self._wait(each)
        self.sends.clear()
        if self.places.pp > 1 and self._has_replicas() and not self.job.sharded:
            self._before_reduce(step)
            for _ in range(2):
                self._reduce("reduce_scatter")
        for each in self.grads:
            self._wait(each)
        self.grads.clear()
        if self.places.pp > 1 and self.at.pp in (0, self.places.pp - 1):
            self._sync("embedding", "all_reduce", 64 << 20)
        if self.places.world_size > 1:
            self._sync("world", "all_reduce", 8)
        self.lane.begin(SpanKind.OPTIMIZER, "step")
        self._work(0.5 * self.job.layer_ms * MS)
        self.lane.end()
        if self.places.pp > 1 and self._has_replicas() and not self.job.sharded:
            self._sync("dp_cp", "all_gather", 96 << 20)

    def _checkpoint(self) -> None:
        took = self.job.checkpoint_ms * MS * float(np.exp(self.noise.normal(0, 0.05)))
        if self.job.records_checkpoints:
            self._host_span(SpanKind.CHECKPOINT, "save", took)
        else:
            self.lane.host_time(took)
