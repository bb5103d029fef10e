"""Forwards and backwards of a step, for all ranks of a stage at once, and their messages.

A receive ends a transfer time after both sides have arrived. Sends run in the background. A
collective inside a compute span ends for all members together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanFlag, SpanKind

from ..faults.spec import HANG_CAUSES, FaultCause
from .chance import Purpose, stream
from .cluster import NS_PER_MS
from .placement import Axis
from .recorder import NEVER, ON_DEVICE, ON_HOST, SpanTemplate
from .scenario import Sends, TpDetail
from .schedule import Schedule, receiver_of, sender_of
from .state import MAIN, SHARE_SLACK, TRACKS, Piece, time_at, wait_template
from .workload import draw_loads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .cluster import Sync
    from .schedule import Exchange, Slot
    from .state import Bucket, StepState, Times
    from .update import Gathers
    from .workload import Lengths

PAUSE_JITTER = 0.2
"""Standard deviation of the logarithm of a garbage collection's duration."""


class Pipeline:
    """The forwards and backwards of one step."""

    def __init__(self, state: StepState, lengths: Lengths, gathers: Gathers) -> None:
        self._state = state
        self._gathers = gathers
        self._lengths = lengths
        self._loads = draw_loads(state.scenario, state.step)
        self._pauses = [
            (fault, stream(state.scenario.seed, Purpose.PAUSES, number, state.step))
            for number, fault in state.effects.pauses
        ]
        self._sent: dict[Slot, Times] = {}
        """When the output of each slot was sent, if it has not been received."""

        self._awaited: dict[Slot, Times] = {}
        """When the receiver of each slot's output began to wait for it."""

        self._arrived: dict[Slot, Times] = {}
        self._seqs: dict[Slot, int] = {}

        self.stopped_at = NEVER
        """When the rank of a crash or hang stopped; `NEVER` without one."""

    def run(self, slot: Slot) -> list[Piece]:
        """Run a slot, after all that it depends on, and return its compute."""
        state = self._state
        if state.scenario.sends is Sends.BLOCKING:
            return self._compute(slot)
        self._receive(slot)
        pieces = self._compute(slot)
        scenario = state.scenario
        receiver = receiver_of(slot, pp=scenario.pp, vpp=scenario.vpp, schedule=scenario.schedule)
        if receiver is not None and receiver.stage != slot.stage:
            self._sent[slot] = state.now[slot.stage]
        return pieces

    def post(self, exchange: Exchange) -> None:
        """Start an exchange."""
        now = self._state.now[exchange.stage]
        for sender, receiver in self._messages(exchange):
            (self._sent if sender in exchange.sends else self._awaited)[sender] = now
            if sender in self._sent and sender in self._awaited:
                posted = np.maximum(self._sent[sender], self._awaited[sender])
                self._arrived[sender] = posted + self._transfer_ns(sender, receiver)

    def finish(self, exchange: Exchange) -> None:
        """End an exchange that all partners have started."""
        state, stage = self._state, exchange.stage
        start = now = state.now[stage]
        messages = self._messages(exchange)
        interval = state.seqs.next_call() if len(messages) > 1 else 0
        flags = ON_DEVICE | SpanFlag.ASYNC
        flags |= SpanFlag.COALESCED if interval else SpanFlag.NOTHING
        for sender, receiver in messages:
            template = self._message_template(sender, receiver)
            if receiver.stage == stage:
                template = _received(template, receiver)
            template = replace(template, interval=interval, flags=flags)
            end = self._arrived[sender] + state.noise.end_ns(state.shape)
            state.recorder.add(stage, template, start, end)
            waited = np.maximum(now, end)
            state.recorder.add(stage, wait_template(template), now, waited)
            now = waited
        state.now[stage] = now

    def _messages(self, exchange: Exchange) -> list[tuple[Slot, Slot]]:
        pp = self._state.scenario.pp
        out = [(slot, receiver_of(slot, pp=pp, vpp=1)) for slot in exchange.sends]
        into = [(sender_of(slot, pp=pp, vpp=1), slot) for slot in exchange.receives]
        return [(sender, receiver) for sender, receiver in out + into if sender and receiver]

    def _transfer_ns(self, sender: Slot, receiver: Slot) -> Times:
        state = self._state
        mean_ns = state.effects.links.p2p_ns(sender.stage, receiver.stage)
        return state.noise.transfer_ns(mean_ns)

    def _receive(self, slot: Slot) -> None:
        state = self._state
        scenario = state.scenario
        sender = sender_of(slot, pp=scenario.pp, vpp=scenario.vpp, schedule=scenario.schedule)
        if sender is None or sender.stage == slot.stage:
            return
        sent, start = self._sent.pop(sender), state.now[slot.stage]
        done = np.maximum(sent, start) + self._transfer_ns(sender, slot)
        template = self._message_template(sender, slot)
        left = done + state.noise.end_ns(state.shape)
        state.recorder.add(sender.stage, template, sent, left)
        end = done + state.noise.end_ns(state.shape)
        state.blocked(slot.stage, _received(template, slot), start, end)
        state.now[slot.stage] = end

    def _message_template(self, sender: Slot, receiver: Slot) -> SpanTemplate:
        """Return the template of a send; the first call assigns its sequence number."""
        state = self._state
        if sender not in self._seqs:
            self._seqs[sender] = state.seqs.next_of_pair(sender.stage, receiver.stage)
        return SpanTemplate(
            kind=SpanKind.PP_SEND,
            name="send",
            track=TRACKS[Axis.PP],
            axis=Axis.PP,
            seq=self._seqs[sender],
            src_stage=sender.stage,
            dst_stage=receiver.stage,
            microbatch=sender.microbatch,
            chunk=sender.chunk,
            num_bytes=state.scenario.activation_bytes,
            flags=ON_DEVICE | SpanFlag.ASYNC,
        )

    def _compute(self, slot: Slot) -> list[Piece]:
        state = self._state
        stage = slot.stage
        ready = state.ready(stage)
        if slot.is_forward:
            ready = self._pause(stage, ready)
        begin, stall = self._stop(slot, ready)
        mean_ms = state.cluster.compute_ms(slot)
        length = self._lengths.factor[slot.microbatch][:, None, None]
        own = state.noise.compute_ns(mean_ms * NS_PER_MS * state.scale[stage] * length)
        template = SpanTemplate(
            kind=SpanKind.FORWARD if slot.is_forward else SpanKind.BACKWARD,
            name=self._name(slot),
            track=MAIN,
            microbatch=slot.microbatch,
            chunk=slot.chunk,
        )
        now = begin if stall is None else begin + stall
        if slot.is_forward and slot.chunk == slot.microbatch == 0:
            compilation = SpanTemplate(
                kind=SpanKind.HOST, name="recompile", track=MAIN, flags=ON_HOST, depth=1
            )
            after = now + state.effects.recompile_ns[stage]
            state.record_lost(stage, compilation, now, after)
            now = after
        if slot.is_weight:
            end = now + self._loaded(slot, own)
            pieces = [Piece(0.0, 1.0, now, end)]
        else:
            pieces, end = self._run_syncs(slot, now, own)
        state.recorder.add(stage, template, begin, end)
        state.now[stage] = end
        return pieces

    def _name(self, slot: Slot) -> str:
        if slot.is_forward:
            return "forward"
        if self._state.scenario.schedule is Schedule.ONE_F_ONE_B:
            return "backward"
        return "backward weight" if slot.is_weight else "backward input"

    def _run_syncs(self, slot: Slot, now: Times, own: Times) -> tuple[list[Piece], Times]:
        """Run the compute of a slot with its collectives.

        Returns:
            The compute, and the end on each rank.
        """
        state = self._state
        syncs, scenario = state.cluster.syncs, state.scenario
        buckets = self._gathers.needed_by(slot)
        if not syncs or (scenario.tp_detail is TpDetail.COLLAPSED and scenario.ep == 1):
            pieces = self._pieces(slot.stage, Piece(0.0, 1.0, now, now + own), buckets)
            return pieces, self._run_unrecorded_syncs(slot.stage, pieces[-1].end, syncs)
        load = self._load(slot)
        pieces, done = [], 0.0
        for sync in syncs:
            piece_ns = np.rint(own * (done + sync.share)) - np.rint(own * done)
            end = now + np.rint(piece_ns * load if sync.is_of_experts else piece_ns).astype(
                np.int64
            )
            whole = Piece(done, done + sync.share, now, end)
            pieces += self._pieces(slot.stage, whole, buckets)
            done += sync.share
            now = self._sync(slot, sync, pieces[-1].end)
        return pieces, now

    def _pieces(self, stage: int, whole: Piece, buckets: list[Bucket]) -> list[Piece]:
        """Split a piece at its waits for parameters: the k-th of n at k / n of the compute."""
        found = []
        for number, bucket in enumerate(buckets):
            length = whole.last_share - whole.first_share
            share = number / len(buckets)
            if not -SHARE_SLACK <= share - whole.first_share < length - SHARE_SLACK:
                continue
            at = time_at([whole], share)
            if share > whole.first_share + SHARE_SLACK:
                found.append(Piece(whole.first_share, share, whole.start, at))
            begin = self._state.wait(stage, bucket, at)
            whole = Piece(share, whole.last_share, begin, begin + (whole.end - at))
        return [*found, whole]

    def _loaded(self, slot: Slot, own: Times) -> Times:
        """Return the compute, with the experts' share scaled by their tokens."""
        if self._loads is None:
            return own
        ratio = self._state.scenario.expert_ratio
        loaded: Times = np.rint(own * (1 - ratio + ratio * self._load(slot))).astype(np.int64)
        return loaded

    def _load(self, slot: Slot) -> NDArray[np.float64] | float:
        """Return each rank's tokens over an equal share, shape (dp, 1, 1)."""
        if self._loads is None:
            return 1.0
        load: NDArray[np.float64] = self._loads[slot.stage, slot.chunk, slot.microbatch]
        return load[:, None, None]

    def _sync(self, slot: Slot, sync: Sync, start: Times) -> Times:
        state = self._state
        template = state.collective_template(
            sync.axis,
            slot.stage,
            sync.name,
            microbatch=slot.microbatch,
            chunk=slot.chunk,
            num_bytes=sync.num_bytes,
            depth=1,
        )
        mean_ns = state.collective_ns(
            slot.stage, sync.axis, num_bytes=sync.num_bytes, passes=sync.passes
        )
        end = state.collective_end(sync.axis, start, mean_ns)
        state.blocked(slot.stage, template, start, end)
        return end

    def _run_unrecorded_syncs(self, stage: int, start: Times, syncs: Sequence[Sync]) -> Times:
        state = self._state
        end = start
        for sync in syncs:
            mean_ns = state.collective_ns(
                stage, sync.axis, num_bytes=sync.num_bytes, passes=sync.passes
            )
            left = state.transfer_end(sync.axis, end, mean_ns)
            end = np.broadcast_to(left, state.shape)
        return end

    def _pause(self, stage: int, ready: Times) -> Times:
        state = self._state
        for fault, rng in self._pauses:
            hit = rng.random(state.shape) < fault.probability
            pause = fault.extra_ns * np.exp(PAUSE_JITTER * rng.standard_normal(state.shape))
            after = ready + np.where(hit, pause, 0).astype(np.int64)
            if fault.has_spans:
                template = SpanTemplate(
                    kind=SpanKind.GC, name="gc generation 2", track=MAIN, flags=ON_HOST
                )
                state.record_lost(stage, template, ready, after)
            ready = after
        return ready

    def _stop(self, slot: Slot, ready: Times) -> tuple[Times, Times | None]:
        """Stop the rank of a crash or hang.

        Returns:
            When the slot begins, and its additional duration: a rank that hangs never begins it, a
            rank that crashes never ends it.
        """
        state = self._state
        ending = state.effects.ending
        middle = state.scenario.num_microbatches // 2
        is_here = slot.is_forward and slot.chunk == 0 and slot.microbatch == middle
        if ending is None or not is_here:
            return ready, None
        here = state.cluster.placement.rank[slot.stage] == ending.ranks[0]
        if not here.any():
            return ready, None
        stall = np.where(here, NEVER, 0)
        at = int(ready[here][0])
        if ending.cause in HANG_CAUSES:
            self.stopped_at = at
            if ending.cause is FaultCause.MISMATCH:
                # A collective of the whole job that one rank calls, and that never ends.
                template = state.collective_template(Axis.WORLD, 0, "barrier")
                rank = np.array(ending.ranks[:1], dtype=np.int32)
                state.recorder.add_some(template, rank, np.array([at]), np.array([NEVER]))
            return ready + stall, None
        self.stopped_at = at + round(state.scenario.forward_ms * NS_PER_MS / 2)
        return ready, stall


def _received(template: SpanTemplate, receiver: Slot) -> SpanTemplate:
    """Return the template of the other end of a send."""
    return replace(
        template,
        kind=SpanKind.PP_RECV,
        name="recv",
        microbatch=receiver.microbatch,
        chunk=receiver.chunk,
        flags=ON_DEVICE,
    )
