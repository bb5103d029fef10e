"""The rate limit of probes, for any number of agents."""

from __future__ import annotations

import heapq
import random
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.clock.probe import ProbeReply
from rankscope.collector.clock.reference import LONGEST_PAUSE_NS, PROBES_PER_S, ProbeRateLimit
from rankscope.collector.clock.sync import ClockSync
from rankscope.tracer.span import UnixNs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.collector.conftest import FakeClock

US, MS, S = 1_000, 1_000_000, 1_000_000_000
POLL_NS = 20 * MS
NUM_HOSTS = 12_288 // 8
NUM_OLDER, NUM_NEWER = 300, 10


class Job:
    """Hosts that start within a second and poll their clocks 50 times a second."""

    def __init__(
        self, num_hosts: int, *, limit: Callable[[Callable[[], int]], ProbeRateLimit]
    ) -> None:
        self.now_ns = 10 * S
        self.probed_ns: list[int] = []
        self.num_probes = [0] * num_hosts
        self.limit = limit(lambda: self.now_ns)
        self.host = 0
        self.num_obeying = num_hosts
        chooser = random.Random(7)
        self.clocks = [
            ClockSync(self.exchange, monotonic_ns=lambda: self.now_ns, uniform=chooser.uniform)
            for _ in range(num_hosts)
        ]
        self.polls = [(self.now_ns + chooser.randrange(S), host) for host in range(num_hosts)]
        heapq.heapify(self.polls)

    def exchange(self) -> ProbeReply:
        self.probed_ns.append(self.now_ns)
        self.num_probes[self.host] += 1
        at = UnixNs(self.now_ns)
        pause_ns = self.limit.next_pause_ns()
        sent_pause_ns = pause_ns if self.host < self.num_obeying else 0
        return ProbeReply(reference_id="r", received_ns=at, replied_ns=at, pause_ns=sent_pause_ns)

    def run(self, for_ns: int) -> None:
        end_ns = self.now_ns + for_ns
        while self.polls[0][0] < end_ns:
            self.now_ns, self.host = heapq.heappop(self.polls)
            self.clocks[self.host].poll()
            heapq.heappush(self.polls, (self.now_ns + POLL_NS, self.host))
        self.now_ns = end_ns


def busiest_second(probed_ns: list[int]) -> int:
    """Return the largest number of probes in one second."""
    first = most = 0
    for place, at_ns in enumerate(probed_ns):
        while probed_ns[first] <= at_ns - S:
            first += 1
        most = max(most, place - first + 1)
    return most


def rate_limit(monotonic_ns: Callable[[], int]) -> ProbeRateLimit:
    return ProbeRateLimit(monotonic_ns=monotonic_ns)


def test_one_host_is_not_limited() -> None:
    job = Job(1, limit=rate_limit)

    job.run(2 * S)

    # 20 per second, rounded up to the next poll: one poll every 20 ms, so pauses are 60 ms.
    assert {later - earlier for earlier, later in pairwise(job.probed_ns)} == {60 * MS}


@pytest.mark.slow
def test_a_job_of_12288_ranks_that_starts_at_once_probes_within_the_rate_limit() -> None:
    # GIVEN an agent for each eight ranks, all on one collector: 30,000 probes without a limit
    job = Job(NUM_HOSTS, limit=rate_limit)

    # WHEN they start, each with one probe before it knows the pause
    job.run(S)
    assert NUM_HOSTS <= len(job.probed_ns) <= NUM_HOSTS + PROBES_PER_S

    # THEN the rate of probes is the limit
    job.probed_ns.clear()
    job.run(3 * S)
    before = list(job.num_probes)
    job.run(8 * S)
    assert busiest_second(job.probed_ns) <= 1.05 * PROBES_PER_S
    assert len(job.probed_ns) >= 0.95 * 11 * PROBES_PER_S
    # and all hosts have the same share
    num_probes = [now - then for now, then in zip(job.num_probes, before, strict=True)]
    assert max(num_probes) - min(num_probes) <= 1


def test_agents_that_probe_at_one_moment_get_different_pauses(clock: FakeClock) -> None:
    limit = ProbeRateLimit(monotonic_ns=clock, probes_per_s=1_000)

    pauses = [limit.next_pause_ns() for _ in range(5)]

    assert pauses == [MS, 2 * MS, 3 * MS, 4 * MS, 5 * MS]
    clock.advance_s(0.003)
    assert limit.next_pause_ns() == 3 * MS
    clock.advance_s(60)
    assert limit.next_pause_ns() == MS


def test_agents_that_ignore_the_pause_do_not_lock_others_out(clock: FakeClock) -> None:
    # GIVEN more probes of older agents than the limit allows in a minute
    limit = ProbeRateLimit(monotonic_ns=clock)
    for _ in range(60 * PROBES_PER_S):
        limit.next_pause_ns()

    assert limit.next_pause_ns() == LONGEST_PAUSE_NS


@pytest.mark.slow
def test_older_and_newer_agents_share_a_collector() -> None:
    # GIVEN 300 agents that ignore the pause, and 10 that keep it
    job = Job(NUM_NEWER + NUM_OLDER, limit=rate_limit)
    job.num_obeying = NUM_NEWER

    job.run(13 * S)

    # THEN the older ones probe as before, and the newer ones still can
    assert min(job.num_probes[NUM_NEWER:]) >= 190
    assert min(job.num_probes[:NUM_NEWER]) >= 2
