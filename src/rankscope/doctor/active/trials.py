"""Active tests of all ranks together: devices, the ranks of each host, groups of hosts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from rankscope.analysis.report.text import format_count

from ..group_test import find_suspects, plan_rounds
from ..outliers import find_slow
from ..result import Outcome, Result, error, healthy, not_applicable, warning
from .measure import Collectives, DeviceSpeed, measure_device, measure_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from ..group_test import Group

SECTION = "active tests"
NUM_PASSES = 3
"""Times that slow groups are measured before a host is accused."""

TIMEOUT = timedelta(seconds=180)
"""Time for a collective: a slow link must be measured, and a dead one must end the test."""

FEW_PEERS = "fewer than 3 peers: no verdict"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveTest:
    """One active test."""

    name: str
    what: str
    unit: str


ACTIVE_TESTS = (
    ActiveTest(name="matmul", what="matmul of each device, in bfloat16 on GPUs", unit="TFLOP/s"),
    ActiveTest(name="memory", what="copy within the memory of each device", unit="GB/s"),
    ActiveTest(name="to-device", what="copy from pinned memory of the host", unit="GB/s"),
    ActiveTest(name="from-device", what="copy to pinned memory of the host", unit="GB/s"),
    ActiveTest(name="loopback", what="TCP of each host to itself", unit="GB/s"),
    ActiveTest(name="host-all-reduce", what="all-reduce of the ranks of a host", unit="GB/s"),
    ActiveTest(name="host-all-to-all", what="all-to-all of the ranks of a host", unit="GB/s"),
    ActiveTest(name="neighbours", what="all-reduce of neighbouring ranks of a host", unit="GB/s"),
    ActiveTest(name="groups", what="all-reduce and all-to-all of groups of hosts", unit="GB/s"),
)
DEVICE_FIELDS = {
    "matmul": "matmul_tflop_per_s",
    "memory": "memory_gb_per_s",
    "to-device": "to_device_gb_per_s",
    "from-device": "from_device_gb_per_s",
}
UNITS = {test.name: test.unit for test in ACTIVE_TESTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank of the test."""

    rank: int
    host: str
    local_rank: int
    device: str

    @property
    def part(self) -> str:
        """Name in results."""
        return f"{self.device} {self.local_rank}"


class World:
    """The ranks of the test, and the process groups among them.

    Args:
        host: Name of this rank's host.
        collectives: Times the collectives of a group on this rank.
    """

    def __init__(
        self, host: str, *, collectives: Callable[[Any], Collectives] = Collectives
    ) -> None:
        import torch
        from torch import distributed as dist

        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        is_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", local_rank) if is_gpu else torch.device("cpu")
        if is_gpu:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        backend = "cpu:gloo,cuda:nccl" if is_gpu else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
        self._dist = dist
        self.rank = dist.get_rank()
        own = Place(
            rank=self.rank, host=host, local_rank=local_rank, device="GPU" if is_gpu else "CPU rank"
        )
        self.places: list[Place] = self.gather(own, Place)
        self.hosts = list(dict.fromkeys(place.host for place in self.places))
        self._collectives = collectives(self.device)

    def gather(self, value: Any, kind: Any) -> list[Any]:  # noqa: ANN401  # of any type
        """Return the values of all ranks, by rank.

        Args:
            value: The value of this rank.
            kind: Its type.
        """
        import torch

        adapter = TypeAdapter(kind)
        # As JSON: torch's functions for objects unpickle what other hosts send.
        data = bytearray(adapter.dump_json(value))
        sizes = [int(size) for size in self._gather(torch.tensor([len(data)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        texts = zip(self._gather(padded), sizes, strict=True)
        return [adapter.validate_json(text[:size].numpy().tobytes()) for text, size in texts]

    def _gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        tensors = [own.new_empty(own.shape) for _ in range(self._dist.get_world_size())]
        self._dist.all_gather(tensors, own)
        return tensors

    def close(self) -> None:
        """End the process group."""
        self._dist.destroy_process_group()

    def ranks_of(self, host: str) -> list[int]:
        """Return the ranks of a host."""
        return [place.rank for place in self.places if place.host == host]

    def in_turns(self, work: Callable[[], Any], kind: Any) -> list[Any]:  # noqa: ANN401
        """Return the values of all ranks: GPUs measure together, processors one after the other."""
        value = None
        if self.device.type == "cuda":
            return self.gather(work(), kind)
        for turn in range(max(place.local_rank for place in self.places) + 1):
            if self.places[self.rank].local_rank == turn:
                value = work()
            self._dist.barrier()
        return self.gather(value, kind)

    def time_groups(self, groups: Sequence[Sequence[int]]) -> dict[str, list[float]]:
        """Return the time of each group by kind of collective, that of its slowest rank.

        Args:
            groups: Ranks of each group; no two groups have a rank in common, and each has two.
        """
        own: dict[str, float] = {}
        handles = [self._dist.new_group([*group], timeout=TIMEOUT) for group in groups]
        for group, handle in zip(groups, handles, strict=True):
            if self.rank in group:
                own = {
                    "all-reduce": self._collectives.all_reduce(handle, len(group)),
                    "all-to-all": self._collectives.all_to_all(handle, len(group)),
                }
        timed = self.gather(own, dict[str, float])
        return {
            kind: [max(timed[rank][kind] for rank in group) for group in groups]
            for kind in ("all-reduce", "all-to-all")
        }


def run_tests(
    host: str, *, collectives: Callable[[Any], Collectives] = Collectives
) -> list[tuple[str, Result]] | None:
    """Return the results of all tests with the host of each, on rank 0; None on the others.

    Args:
        host: Name of this rank's host.
        collectives: Times the collectives of a group.
    """
    world = World(host, collectives=collectives)
    try:
        results = [
            (of_host, _result(name, outcome)) for of_host, name, outcome in _all_outcomes(world)
        ]
    finally:
        world.close()
    return results if world.rank == 0 else None


def _result(name: str, outcome: Outcome) -> Result:
    return Result(
        section=SECTION,
        check=name,
        state=outcome.state,
        reason=outcome.reason,
        remedy=outcome.remedy,
        part=outcome.part,
    )


Found = tuple[str, str, Outcome]
"""Host, test, outcome."""


def _all_outcomes(world: World) -> Iterator[Found]:
    speeds: list[DeviceSpeed] = world.in_turns(lambda: measure_device(world.device), DeviceSpeed)
    parts = [(place.host, place.part) for place in world.places]
    for name, field in DEVICE_FIELDS.items():
        values = [getattr(speed, field) for speed in speeds]
        if None in values:
            yield world.hosts[0], name, not_applicable("no GPU")
        else:
            yield from judge_speeds(name, parts, values)
    firsts = [world.ranks_of(host)[0] for host in world.hosts]
    loopbacks = world.gather(measure_loopback() if world.rank in firsts else None, float | None)
    yield from judge_speeds(
        "loopback", [(host, "") for host in world.hosts], [loopbacks[rank] for rank in firsts]
    )
    yield from _host_outcomes(world)
    yield from _group_outcomes(world)


def _host_outcomes(world: World) -> Iterator[Found]:
    """Test the ranks of each host together, then its neighbouring ranks."""
    of_host = {host: world.ranks_of(host) for host in world.hosts}
    wide = [host for host, ranks in of_host.items() if len(ranks) > 1]
    if not wide:
        for name in ("host-all-reduce", "host-all-to-all", "neighbours"):
            yield world.hosts[0], name, not_applicable("each host has one rank")
        return
    timed = world.time_groups([of_host[host] for host in wide])
    for kind, times in timed.items():
        speeds = [1.0 / time for time in times]
        yield from judge_speeds(f"host-{kind}", [(host, "") for host in wide], speeds)
    parts, values = [], []
    for first in (0, 1):
        pairs = [
            (host, ranks[place : place + 2])
            for host, ranks in of_host.items()
            for place in range(first, len(ranks) - 1, 2)
        ]
        times = world.time_groups([pair for _, pair in pairs])["all-reduce"]
        parts += [(host, f"ranks {pair[0]} and {pair[1]}") for host, pair in pairs]
        values += [1.0 / time for time in times]
    yield from judge_speeds("neighbours", parts, values)


def judge_speeds(
    name: str, parts: Sequence[tuple[str, str]], speeds: Sequence[float]
) -> Iterator[Found]:
    """Yield an outcome for each part that is slower than its peers, or one for all.

    Args:
        name: Name of the test.
        parts: Host and name of each part.
        speeds: Speed of each part, in the unit of the test.
    """
    unit = UNITS[name]
    slow = find_slow([1.0 / speed for speed in speeds])
    low, high = min(speeds), max(speeds)
    spread = f"{high:,.3g} {unit}" if len(speeds) == 1 else f"{low:,.3g} to {high:,.3g} {unit}"
    hosts = list(dict.fromkeys(host for host, _ in parts))
    if slow is None:
        yield hosts[0], name, not_applicable(f"{spread}; {FEW_PEERS}")
        return
    middle = sorted(speeds)[len(speeds) // 2]
    deviating = set()
    for (host, part), speed, is_slow in zip(parts, speeds, slow.tolist(), strict=True):
        if is_slow:
            deviating.add(host)
            text = f"{speed:,.3g} {unit}, {1 - speed / middle:.0%} below the median of its"
            outcome = error(
                f"{text} {len(speeds) - 1} peers ({middle:,.3g} {unit})",
                "take it out of the job; see the static checks of its host",
                part=part,
            )
            yield host, name, outcome
    for host in hosts:
        if host not in deviating:
            yield host, name, healthy(f"{spread} over {format_count(len(speeds), 'peer')}")


def _group_outcomes(world: World) -> Iterator[Found]:
    """Test groups of hosts, and name the slow hosts."""
    rounds = plan_rounds(len(world.hosts))
    if not rounds:
        yield world.hosts[0], "groups", not_applicable("one host")
        return
    groups = [group for of_round in rounds for group in of_round]
    passes: list[dict[str, list[float]]] = []
    found: list[Found] = []
    for _ in range(NUM_PASSES):
        times: dict[str, list[float]] = {}
        for of_round in rounds:
            ranks = [
                [rank for number in group for rank in world.ranks_of(world.hosts[number])]
                for group in of_round
            ]
            for kind, values in world.time_groups(ranks).items():
                times.setdefault(kind, []).extend(values)
        passes.append(times)
        found = [*judge_groups(world.hosts, groups, passes)]
        # All ranks have the same times, so that all go on or none.
        if not any(outcome.is_deviation for *_, outcome in found):
            break
    yield from found


def judge_groups(
    hosts: Sequence[str], groups: Sequence[Group], passes: Sequence[dict[str, list[float]]]
) -> Iterator[Found]:
    """Yield the outcome of each host, from the times of groups of hosts.

    A group is slow if it is so in one kind of collective in each pass: chance does not repeat.

    Args:
        hosts: Names of the hosts.
        groups: Numbers of the hosts in each group.
        passes: Time of each group by kind of collective, of each pass: any quantity that is larger
            for a slower one, and equal for groups of all sizes.
    """
    slow_groups: dict[Group, str] = {}
    is_judged = False
    for kind, values in passes[-1].items():
        verdicts = [slow for times in passes if (slow := find_slow(times[kind])) is not None]
        if len(verdicts) < len(passes):
            continue
        is_judged = True
        least = min(values)
        for place in np.flatnonzero(np.all(verdicts, axis=0)).tolist():
            text = f"{kind} {values[place] / least:.2g} times as long as that of the fastest"
            slow_groups.setdefault(groups[place], text)
    shape = f"{format_count(len(groups), 'group')} of {format_count(len(hosts), 'host')}"
    if not is_judged:
        yield hosts[0], "groups", not_applicable(f"{shape}; {FEW_PEERS}")
        return
    suspects = find_suspects(groups, slow_groups.keys())
    deviating = set()
    for number in suspects.slow:
        deviating.add(number)
        reasons = [text for group, text in slow_groups.items() if number in group]
        text = f"all {format_count(len(reasons), 'group')} with this host are slow: {reasons[0]}"
        yield hosts[number], "groups", error(text, "take the host out of the job; see its checks")
    for members in suspects.unclear:
        names = ", ".join(hosts[number] for number in members)
        for number in members:
            deviating.add(number)
            text = f"not unique: at least one of {names} is slow"
            yield (
                hosts[number],
                "groups",
                warning(text, "test these hosts in pairs with others", part=names),
            )
    for members in suspects.contradictory:
        names = ", ".join(hosts[number] for number in members)
        text = f"{names} are slow together, and each is fast with others"
        yield (
            hosts[members[0]],
            "groups",
            warning(text, "repeat the test; check the switches between them", part=names),
        )
        deviating.add(members[0])
    for number, host in enumerate(hosts):
        if number not in deviating:
            yield host, "groups", healthy(f"as fast as its peers in {shape}")
