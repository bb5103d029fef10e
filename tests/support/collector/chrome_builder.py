"""Chrome traces as MegaScan and ndtimeline write them, of a pipeline job that is timed by its
dependencies.

Names and arguments: MegaScan's `scripts/aggregate.py` and `megatron/training/trace.py`, and
veScale's `ndtimeline/handlers/local_timeline_handler.py`. The schedule is 1F1B.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

UNIX_US = 1_790_000_000 * 10**6
TRANSFER_MS = 1.0
OPTIMIZER_MS = 5.0
ALLREDUCE_MS = 2.0
FORWARD_MS = 10.0
STREAMS = {"main": 0, "pp ->": 1, "pp <-": 2, "pp send/recv": 3, "dp collective": 5}
"""Number of a thread of ndtimeline, behind ten times the rank."""

MOVES = {
    "recv-warmup": ("forward<",), "recv-extra": ("forward<",), "send-warmup": ("forward>",),
    "exchange-next": ("forward>", "backward<"), "exchange-prev": ("backward>", "forward<"),
    "send-extra": ("backward>",), "recv-cooldown": ("backward<",), "send-cooldown": ("backward>",),
}  # fmt: skip
"""What a call of Megatron-LM's schedule sends (>) and receives (<)."""

ND_NAMES = {
    "recv-warmup": ("forward-recv", "pp ->"), "recv-extra": ("forward-recv", "pp ->"),
    "send-warmup": ("forward-send", "pp <-"),
    "exchange-next": ("forward-send-backward-recv", "pp send/recv"),
    "exchange-prev": ("backward-send-forward-recv", "pp send/recv"),
    "send-extra": ("backward-send", "pp ->"), "send-cooldown": ("backward-send", "pp ->"),
    "recv-cooldown": ("backward-recv", "pp <-"),
    "forward-warmup": ("forward-compute", "main"), "forward": ("forward-compute", "main"),
    "backward": ("backward-compute", "main"), "backward-cooldown": ("backward-compute", "main"),
    "allreduce": ("grads-reduce-scatter", "dp collective"), "optimizer": ("optimizer", "main"),
}  # fmt: skip
"""Name and stream in ndtimeline of each call of the schedule."""


class Call(NamedTuple):
    """An operation of a rank, ms from the job's begin."""

    rank: int
    step: int
    name: str
    microbatch: int
    peers: tuple[int, ...]
    """Ranks with which it communicated; empty at an end of the pipeline."""

    begin: float
    end: float


@dataclass(kw_only=True)
class PipelineJob:
    """A job of ``num_stages`` x ``num_replicas`` ranks, whose schedule is Megatron-LM's 1F1B.

    Stage ``s`` of replica ``d`` has rank ``d + s * num_replicas``. Sends block until they arrive.
    """

    num_stages: int = 4
    num_replicas: int = 1
    num_steps: int = 6
    num_microbatches: int = 4
    forward_ms: dict[int, float] = field(default_factory=dict)
    """By rank, where it is not `FORWARD_MS`; a backward takes twice as long."""

    def calls(self) -> list[Call]:
        """Return what the ranks did, ascending by begin on each."""
        free = dict.fromkeys(range(self.num_stages * self.num_replicas), 1.0)
        calls = []
        for step in range(self.num_steps):
            for replica in range(self.num_replicas):
                calls += self._run(replica, step, free)
            for stage in range(self.num_stages):
                first = stage * self.num_replicas
                members = range(first, first + self.num_replicas)
                reduced = max(free[rank] for rank in members) + ALLREDUCE_MS
                for rank in members:
                    peers = tuple(other for other in members if other != rank)
                    calls.append(Call(rank, step, "allreduce", -1, peers, free[rank], reduced))
                    free[rank] = reduced + OPTIMIZER_MS
                    calls.append(Call(rank, step, "optimizer", -1, (), reduced, free[rank]))
        return calls

    def _program(self, stage: int) -> list[tuple[str, int]]:
        warm = min(self.num_stages - 1 - stage, self.num_microbatches)
        rest = self.num_microbatches - warm
        program = []
        for place in range(warm):
            program += [(name, place) for name in ("recv-warmup", "forward-warmup", "send-warmup")]
        if rest:
            program.append(("recv-extra", warm))
        for place in range(rest):
            program += [("forward", warm + place), ("exchange-next", -1), ("backward", place)]
            program.append(("send-extra" if place == rest - 1 else "exchange-prev", -1))
        for place in range(rest, self.num_microbatches):
            program += [
                (name, place) for name in ("recv-cooldown", "backward-cooldown", "send-cooldown")
            ]
        return program

    def _run(self, replica: int, step: int, free: dict[int, float]) -> list[Call]:
        """Run a step of one replica: a transfer ends a while after both ends have entered."""
        programs = [self._program(stage) for stage in range(self.num_stages)]
        entered: dict[tuple[int, int, str, int], dict[str, float]] = defaultdict(dict)
        counts: Counter[tuple[int, int, str, str]] = Counter()
        waiting: dict[int, tuple[float, list[tuple[int, int, str, int]]]] = {}
        calls: list[Call] = []
        while any(programs):
            for stage, program in enumerate(programs):
                if not program:
                    continue
                name, microbatch = program[0]
                rank = replica + stage * self.num_replicas
                peers: set[int] = set()
                if name not in MOVES:
                    took = self.forward_ms.get(rank, FORWARD_MS)
                    end = free[rank] + took * (2 if name.startswith("backward") else 1)
                else:
                    if stage not in waiting:
                        keys = []
                        for move in MOVES[name]:
                            flow, sign = move[:-1], move[-1]
                            to = 1 if (flow == "forward") == (sign == ">") else -1
                            if not 0 <= stage + to < self.num_stages:
                                continue
                            ends = (stage, stage + to) if sign == ">" else (stage + to, stage)
                            key = (*ends, flow, counts[(*ends, flow, sign)])
                            counts[(*ends, flow, sign)] += 1
                            entered[key][sign] = free[rank]
                            keys.append(key)
                        waiting[stage] = free[rank], keys
                    _, keys = waiting[stage]
                    if any(len(entered[key]) < len("<>") for key in keys):
                        continue
                    waiting.pop(stage)
                    ends_at = [max(entered[key].values()) + TRANSFER_MS for key in keys]
                    end = max([free[rank], *ends_at])
                    peers = {
                        replica + place * self.num_replicas
                        for key in keys
                        for place in key[:2]
                        if place != stage
                    }
                program.pop(0)
                calls.append(Call(rank, step, name, microbatch, tuple(peers), free[rank], end))
                free[rank] = end
        return calls

    def only_passes(self) -> list[dict[str, Any]]:
        """Return the B and E events of MegaScan's older form, without communication."""
        events = []
        for call in self.calls():
            name = call.name.partition("-")[0]
            if name not in ("forward", "backward"):
                continue
            stage = call.rank // self.num_replicas
            args: dict[str, Any] = {"iteration": call.step}
            more = {"microbatch": call.microbatch, "model_chunk": 0, "pp_rank": stage}
            place = {"pid": call.rank, "tid": 0, "name": name, "cname": "thread_state_running"}
            events.append({**place, "ph": "B", "ts": round(call.begin * 1000), "args": args})
            events.append({**place, "ph": "E", "ts": round(call.end * 1000), "args": args | more})
        return sorted(events, key=lambda event: (event["ts"], event["ph"] == "B"))

    def megascan(self) -> list[dict[str, Any]]:
        """Return the complete events of MegaScan, all of a rank on one thread."""
        events: list[dict[str, Any]] = []
        for call in self.calls():
            stage, replica = divmod(call.rank, self.num_replicas)
            args: dict[str, Any] = {
                "iteration": call.step, "dp_rk": replica, "pp_rk": stage, "tp_rk": 0,
                "g_rk": call.rank, "dev": 0, "id": len(events),
            }  # fmt: skip
            if call.microbatch >= 0:
                args["micro_batch_index"] = call.microbatch
            if call.name in MOVES:
                args["data"] = 1 << 20 if call.peers else None
                args["group"] = sorted([call.rank, *call.peers]) if call.peers else None
            events.append({
                "name": call.name, "cname": "thread_state_unknown", "ph": "X",
                "ts": int(call.begin * 1000), "dur": int((call.end - call.begin) * 1000),
                "pid": call.rank, "tid": 0, "args": args,
            })  # fmt: skip
        return events

    def ndtimeline(self) -> list[dict[str, Any]]:
        """Return the events of veScale's handler: processes are replicas, threads are streams."""
        events: list[dict[str, Any]] = []
        seen: set[tuple[int, str]] = set()
        for call in self.calls():
            stage, replica = divmod(call.rank, self.num_replicas)
            name, stream = ND_NAMES[call.name]
            if stream != "main" and not call.peers:
                continue
            # The first communication of a stream is lost: the stream does not exist before it.
            if stream != "main" and (call.rank, stream) not in seen:
                seen.add((call.rank, stream))
                continue
            events.append({
                "name": name, "cat": name, "ph": "X", "pid": replica,
                "tid": 10 * call.rank + STREAMS[stream],
                "args": {"rank": call.rank, "step": call.step, "tp": 0, "pp": stage},
                "ts": UNIX_US + call.begin * 1000, "dur": (call.end - call.begin) * 1000,
            })  # fmt: skip
        events += [
            {"name": "process_name", "pid": replica, "ph": "M",
             "args": {"name": f"dp rank[{replica}]"}}
            for replica in range(self.num_replicas)
        ]  # fmt: skip
        return events
