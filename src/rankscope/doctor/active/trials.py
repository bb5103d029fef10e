"""Active tests of all ranks together: devices, the ranks of each host, groups of hosts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from pydantic import TypeAdapter

from rankscope.analysis.report.text import format_count

from ..group_test import Group, find_suspects, plan_pairs, plan_rounds
from ..outliers import count_fast_if_few, find_slow
from ..result import Outcome, Result, error, healthy, not_applicable, warning
from .adapters import Adapter, only_interface, own_adapters
from .measure import Collectives, DeviceSpeed, measure_device, measure_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

SECTION = "active tests"
NUM_PASSES = 3
"""Times that slow groups are measured before a host is accused."""

TIMEOUT = timedelta(seconds=180)
"""Time for a collective: a slow link must be measured, and a dead one must end the test."""

FEW_PEERS = "fewer than 3 peers: no verdict"
TOO_FEW_FAST = "too few are fast to say that the slow ones are bad"
COMPARE = "test them with golden hosts"


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
    ActiveTest(
        name="nic-pairs",
        what="all-reduce and all-to-all of each network adapter with its counterparts on three"
        " other hosts",
        unit="GB/s",
    ),
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
    """The ranks of the test, and the process groups among them."""

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
        """Return the values of all ranks, which are of one kind, by rank."""
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

    def time_groups(
        self, groups: Sequence[Sequence[int]], *, interface: str = ""
    ) -> dict[str, list[float]]:
        """Return the time of each group by kind of collective, that of its slowest rank.

        Args:
            groups: Ranks of each group; no two groups have a rank in common, and each has two.
            interface: Network interface of this rank; "": the backend chooses.
        """
        own: dict[str, float] = {}
        with only_interface(interface):
            handles = [self._dist.new_group([*group], timeout=TIMEOUT) for group in groups]
        for group, handle in zip(groups, handles, strict=True):
            if self.rank in group:
                own = {
                    "all-reduce": self._collectives.all_reduce(handle, len(group)),
                    "all-to-all": self._collectives.all_to_all(handle, len(group)),
                }
        timed = self.gather(own, dict[str, float])
        for group, handle in zip(groups, handles, strict=True):
            if self.rank in group:
                self._dist.destroy_process_group(handle)
        return {
            kind: [max(timed[rank][kind] for rank in group) for group in groups]
            for kind in ("all-reduce", "all-to-all")
        }


def run_tests(
    host: str, *, collectives: Callable[[Any], Collectives] = Collectives
) -> list[tuple[str, Result]] | None:
    """Return the results of all tests with the host of each, on rank 0; None on the others."""
    world = World(host, collectives=collectives)
    try:
        results = [
            (of_host, Result.of(outcome, section=SECTION, check=name))
            for of_host, name, outcome in _all_outcomes(world)
        ]
    finally:
        world.close()
    return results if world.rank == 0 else None


Found = tuple[str, str, Outcome]
"""Host, test, outcome."""

Times = dict[str, list[float]]
"""Time of each group by kind of collective."""


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
    yield from _pair_outcomes(world)
    yield from group_outcomes(world)


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
    if num_fast := count_fast_if_few([1.0 / speed for speed in speeds]):
        text = f"{spread}: {len(speeds) - num_fast} of {len(speeds)} are slower than the others"
        yield hosts[0], name, warning(f"{text}; {TOO_FEW_FAST}", COMPARE)
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


class GroupTimer(Protocol):
    """Hosts whose collectives are timed."""

    @property
    def hosts(self) -> Sequence[str]:
        """Names, in the order of their numbers."""

    def ranks_of(self, host: str) -> list[int]:
        """Return the ranks of a host."""

    def time_groups(self, groups: Sequence[Sequence[int]]) -> Times:
        """Return the time of each group of ranks by kind of collective."""


def group_outcomes(world: GroupTimer) -> Iterator[Found]:
    """Test groups of hosts, and name the slow hosts."""
    rounds = plan_rounds(len(world.hosts))
    if not rounds:
        yield world.hosts[0], "groups", not_applicable("one host")
        return

    def measure() -> Times:
        times: Times = {}
        for of_round in rounds:
            ranks = [
                [rank for number in group for rank in world.ranks_of(world.hosts[number])]
                for group in of_round
            ]
            for kind, values in world.time_groups(ranks).items():
                times.setdefault(kind, []).extend(values)
        return times

    groups = [group for of_round in rounds for group in of_round]
    members = [(host, "") for host in world.hosts]
    yield from _repeat(measure, lambda passes: judge_groups("groups", members, groups, passes))


def _pair_outcomes(world: World) -> Iterator[Found]:
    if len(world.hosts) == 1:
        yield world.hosts[0], "nic-pairs", not_applicable("one host")
        return
    pairs = AdapterPairs(world)
    yield from _repeat(pairs.measure, pairs.judge)
    yield from pairs.left_out()


Pair = tuple[int, Group]
"""Number of an adapter on its host, and the numbers of both hosts."""


class AdapterPairs:
    """Pairs of adapters: those of one number on two hosts."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._own = world.places[world.rank]
        of_rank: list[list[Adapter]] = world.gather(
            own_adapters(world.device.type, self._own.local_rank), list[Adapter]
        )
        self._adapters = [
            [(rank, adapter) for rank in world.ranks_of(host) for adapter in of_rank[rank]]
            for host in world.hosts
        ]
        self._rounds = plan_pairs(len(world.hosts))
        self._num = min(map(len, self._adapters))

    def measure(self) -> dict[Pair, dict[str, float]]:
        """Return the times of each pair by kind; one adapter of a host works at a time."""
        measured: dict[Pair, dict[str, float]] = {}
        for number in range(self._num):
            rank, adapter = self._adapters[self._world.hosts.index(self._own.host)][number]
            interface = adapter.interface if rank == self._own.rank else ""
            for of_round in self._rounds:
                ranks = [[self._adapters[host][number][0] for host in pair] for pair in of_round]
                times = self._world.time_groups(ranks, interface=interface)
                for place, pair in enumerate(of_round):
                    measured[number, pair] = {kind: of[place] for kind, of in times.items()}
        return measured

    def judge(self, passes: Sequence[dict[Pair, dict[str, float]]]) -> Iterator[Found]:
        """Yield the outcome of each adapter, compared with those of its nominal speed."""
        hosts = self._world.hosts
        members = [
            (host, self._adapters[place][number][1].part)
            for number in range(self._num)
            for place, host in enumerate(hosts)
        ]
        by_kind: dict[frozenset[str], list[Pair]] = {}
        for number, pair in passes[0]:
            kinds = frozenset(self._adapters[host][number][1].kind for host in pair)
            by_kind.setdefault(kinds, []).append((number, pair))
        for pairs in by_kind.values():
            groups = [tuple(number * len(hosts) + host for host in pair) for number, pair in pairs]
            times = [
                {kind: [measured[pair][kind] for pair in pairs] for kind in measured[pairs[0]]}
                for measured in passes
            ]
            yield from judge_groups("nic-pairs", members, groups, times)

    def left_out(self) -> Iterator[Found]:
        """Yield the hosts that have more adapters than others."""
        for host, adapters in zip(self._world.hosts, self._adapters, strict=True):
            if len(adapters) > self._num:
                num = format_count(len(adapters), "adapter")
                text = f"{self._num} of its {num} have a counterpart on each host"
                yield host, "nic-pairs", warning(text, "name as many on each host")


Measured = TypeVar("Measured")


def _repeat(
    measure: Callable[[], Measured], judge: Callable[[Sequence[Measured]], Iterator[Found]]
) -> list[Found]:
    """Return the outcomes of the passes, the next of which is made only if something deviates."""
    passes: list[Measured] = []
    found: list[Found] = []
    for _ in range(NUM_PASSES):
        passes.append(measure())
        found = [*judge(passes)]
        # All ranks have the same times, so that all go on or none.
        if not any(outcome.is_deviation for *_, outcome in found):
            break
    return found


def judge_groups(
    test: str,
    members: Sequence[tuple[str, str]],
    groups: Sequence[Group],
    passes: Sequence[Times],
) -> Iterator[Found]:
    """Yield the outcome of each member, from the times of groups of members.

    A group is slow if it is so in one kind of collective in each pass: chance does not repeat.

    Args:
        test: Name of the test.
        members: Host and part of each member: all hosts, or all adapters.
        groups: Numbers of the members in each group.
        passes: Time of each group by kind of collective, of each pass: any quantity that is larger
            for a slower one, and equal for groups of all sizes.
    """
    own = sorted({number for group in groups for number in group})
    noun = "host" if not any(part for _, part in members) else "adapter"
    shape = f"{format_count(len(groups), 'group')} of {format_count(len(own), noun)}"
    slow_groups = _slow_groups(groups, passes)
    if slow_groups is None:
        yield members[own[0]][0], test, not_applicable(f"{shape}; {FEW_PEERS}")
        return
    num_fast = 0 if slow_groups else _num_fast(passes)
    if num_fast:
        text = f"{len(groups) - num_fast} of {shape} are slower than the others; {TOO_FEW_FAST}"
        yield members[own[0]][0], test, warning(text, COMPARE)
        return
    suspects = find_suspects(groups, slow_groups.keys())
    deviating = set()
    for number in suspects.slow:
        deviating.add(number)
        reasons = [text for group, text in slow_groups.items() if number in group]
        text = f"all {format_count(len(reasons), 'group')} with this {noun} are slow: {reasons[0]}"
        host, part = members[number]
        remedy = "take the host out of the job; see its checks"
        yield host, test, error(text, remedy, part=part)
    for unclear in suspects.unclear:
        names = _names(members, unclear)
        for number in unclear:
            deviating.add(number)
            text = f"not unique: at least one of {names} is slow"
            remedy = f"test each {noun} with others"
            yield members[number][0], test, warning(text, remedy, part=names)
    for number in suspects.hidden:
        deviating.add(number)
        host, part = members[number]
        text = f"not judged: each group with this {noun} has a slow one"
        yield host, test, warning(text, f"repeat the test without the slow {noun}s", part=part)
    for contradictory in suspects.contradictory:
        names = _names(members, contradictory)
        text = f"{names} are slow together, and each is fast with others"
        remedy = "repeat the test; check the switches between them"
        yield members[contradictory[0]][0], test, warning(text, remedy, part=names)
        deviating.add(contradictory[0])
    for number in own:
        if number not in deviating:
            host, part = members[number]
            yield host, test, healthy(f"as fast as its peers in {shape}", part=part)


def _slow_groups(groups: Sequence[Group], passes: Sequence[Times]) -> dict[Group, str] | None:
    """Return the groups that were slow in each pass, with how slow; None if all are too few."""
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
    return slow_groups if is_judged else None


def _num_fast(passes: Sequence[Times]) -> int:
    """Return the number of fast groups if they are too few in each pass, in one kind; else 0."""
    return max(min(count_fast_if_few(times[kind]) for times in passes) for kind in passes[-1])


def _names(members: Sequence[tuple[str, str]], numbers: Sequence[int]) -> str:
    return ", ".join(" ".join(filter(None, members[number])) for number in numbers)
