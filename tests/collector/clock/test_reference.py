"""However many agents ask a collector's clock, they ask it no more often than it can answer."""

from __future__ import annotations

import heapq
import random
from itertools import pairwise
from typing import TYPE_CHECKING

from rankscope.collector.clock.probe import ProbeReply
from rankscope.collector.clock.reference import LONGEST_PAUSE_NS, PROBES_PER_S, ProbeRateLimit
from rankscope.collector.clock.sync import ClockSync
from rankscope.tracer.span import UnixNs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.collector.conftest import FakeClock

US, MS, S = 1_000, 1_000_000, 1_000_000_000
LOOK_NS = 20 * MS
NUM_HOSTS = 12_288 // 8
NUM_OLDER, NUM_NEWER = 300, 10


class Job:
    """Hosts that start within a second and look after their clocks 50 times a second."""

    def __init__(
        self, num_hosts: int, *, pace: Callable[[Callable[[], int]], ProbeRateLimit]
    ) -> None:
        self.now_ns = 10 * S
        self.asked_ns: list[int] = []
        self.num_asked = [0] * num_hosts
        self.pace = pace(lambda: self.now_ns)
        self.host = 0
        self.num_obeying = num_hosts
        chooser = random.Random(7)
        self.clocks = [
            ClockSync(self.exchange, monotonic_ns=lambda: self.now_ns, uniform=chooser.uniform)
            for _ in range(num_hosts)
        ]
        self.looks = [(self.now_ns + chooser.randrange(S), host) for host in range(num_hosts)]
        heapq.heapify(self.looks)

    def exchange(self) -> ProbeReply:
        self.asked_ns.append(self.now_ns)
        self.num_asked[self.host] += 1
        at = UnixNs(self.now_ns)
        pause_ns = self.pace.next_pause_ns()
        told_ns = pause_ns if self.host < self.num_obeying else 0
        return ProbeReply(reference_id="r", received_ns=at, replied_ns=at, pause_ns=told_ns)

    def run(self, for_ns: int) -> None:
        end_ns = self.now_ns + for_ns
        while self.looks[0][0] < end_ns:
            self.now_ns, self.host = heapq.heappop(self.looks)
            self.clocks[self.host].poll()
            heapq.heappush(self.looks, (self.now_ns + LOOK_NS, self.host))
        self.now_ns = end_ns


def busiest_second(asked_ns: list[int]) -> int:
    first = most = 0
    for place, at_ns in enumerate(asked_ns):
        while asked_ns[first] <= at_ns - S:
            first += 1
        most = max(most, place - first + 1)
    return most


def a_pace(monotonic_ns: Callable[[], int]) -> ProbeRateLimit:
    return ProbeRateLimit(monotonic_ns=monotonic_ns)


def test_one_host_probes_as_often_as_it_likes() -> None:
    job = Job(1, pace=a_pace)

    job.run(2 * S)

    # 20 a second, after a start within the first one; looks are 20 ms apart, so each takes 60 ms.
    assert {later - earlier for earlier, later in pairwise(job.asked_ns)} == {60 * MS}


def test_a_job_of_12288_ranks_that_starts_at_once_asks_no_more_than_can_be_answered() -> None:
    # GIVEN an agent for each eight of them, all on one collector; they would ask 30,000 times
    job = Job(NUM_HOSTS, pace=a_pace)

    # WHEN they have started, each with one probe that nobody could hold back
    job.run(S)
    assert NUM_HOSTS <= len(job.asked_ns) <= NUM_HOSTS + PROBES_PER_S

    # THEN the collector is asked as often as it says and no more
    job.asked_ns.clear()
    job.run(3 * S)
    before = list(job.num_asked)
    job.run(8 * S)
    assert busiest_second(job.asked_ns) <= 1.05 * PROBES_PER_S
    assert len(job.asked_ns) >= 0.95 * 11 * PROBES_PER_S
    # and each host asks it as often as every other
    num_asked = [now - then for now, then in zip(job.num_asked, before, strict=True)]
    assert max(num_asked) - min(num_asked) <= 1


def test_who_came_at_one_moment_is_sent_back_at_moments_of_their_own(clock: FakeClock) -> None:
    pace = ProbeRateLimit(monotonic_ns=clock, probes_per_s=1_000)

    pauses = [pace.next_pause_ns() for _ in range(5)]

    assert pauses == [MS, 2 * MS, 3 * MS, 4 * MS, 5 * MS]
    clock.advance_s(0.003)
    assert pace.next_pause_ns() == 3 * MS
    clock.advance_s(60)
    assert pace.next_pause_ns() == MS


def test_agents_that_do_not_keep_to_it_keep_nobody_out(clock: FakeClock) -> None:
    # GIVEN more asked than could be answered in a minute, by older agents
    pace = ProbeRateLimit(monotonic_ns=clock)
    for _ in range(60 * PROBES_PER_S):
        pace.next_pause_ns()

    assert pace.next_pause_ns() == LONGEST_PAUSE_NS


def test_older_and_newer_agents_share_a_collector() -> None:
    # GIVEN 300 agents that know of no pause, and 10 that do
    job = Job(NUM_NEWER + NUM_OLDER, pace=a_pace)
    job.num_obeying = NUM_NEWER

    job.run(13 * S)

    # THEN the older ones ask as they always did, and the newer ones still come to their probes
    assert min(job.num_asked[NUM_NEWER:]) >= 190
    assert min(job.num_asked[:NUM_NEWER]) >= 2
