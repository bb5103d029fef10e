"""Samples of devices and network adapters of the hosts, once per step, and the hosts' clocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NS_PER_S

from ..faults.spec import FaultCause, NetworkReason
from .chance import Purpose, stream
from .placement import host_name
from .tables import coded_column, number_column, same_column, same_number, table

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from .cluster import Cluster
    from .scenario import Scenario

CLOCK_HZ = 1.755e9
POWER_W = 620.0
JITTER_RATIO = 0.003
HW_THERMAL_SLOWDOWN = 0x40
"""Source: NVML, ``nvmlClocksEventReasonHwThermalSlowdown``."""

GAUGES = ("gpu-clock-hz", "gpu-power-w", "gpu-throttle-reasons")
COUNTERS = ("rdma-ecn-marked-packets", "rdma-retransmitted-packets", "link-down-events")
"""Counters of the network adapter of each device."""

COUNTER_OF_REASON = {
    NetworkReason.CONGESTION: 0,
    NetworkReason.RETRANSMIT: 1,
    NetworkReason.FLAP: 2,
}
HEALTHY_RATES = (40.0, 0.5, 0.0)
"""Mean increase of each counter per step."""

DEGRADED_RATES = (40_000.0, 4_000.0, 2.0)


class Monitors:
    """Gauges and counters of all hosts over the steps."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._counts = np.zeros((len(COUNTERS), cluster.scenario.world_size))
        self._hosts = tuple(host_name(host) for host in range(cluster.scenario.num_hosts))

    def read(self, step: int, run_id: str, *, at_ns: int) -> pa.Table:
        """Return table ``samples`` of one moment of a step, Unix time."""
        place = self._cluster.placement
        values = np.concatenate((self._gauges(step), self._counted(step)))
        names = GAUGES + COUNTERS if self._cluster.scenario.record_samples else ()
        values = values[: len(names)]
        num_rows, num_ranks = values.size, len(place.host)
        return table(
            {
                "run_id": same_column(run_id, num_rows),
                "host": coded_column(np.tile(place.host, len(names)), self._hosts),
                "device": number_column(np.tile(place.local_rank, len(names)), np.int32),
                "at_ns": same_number(at_ns, num_rows, np.int64),
                "name": coded_column(np.repeat(np.arange(len(names)), num_ranks), names),
                "value": number_column(values.ravel()),
            }
        )

    def _gauges(self, step: int) -> NDArray[np.float64]:
        """Return clock, power and throttle reasons of each rank's device.

        Clock and power of a throttled device are lower by the factor of its fault.
        """
        num_ranks = self._cluster.scenario.world_size
        rng = stream(self._cluster.scenario.seed, Purpose.SAMPLES, step)
        slower, reasons = np.ones(num_ranks), np.zeros(num_ranks)
        for number, fault in enumerate(self._cluster.scenario.faults):
            if fault.cause is FaultCause.CLOCK_THROTTLE and fault.is_active(step):
                ranks = list(self._cluster.effects.ranks_of(number))
                slower[ranks] *= fault.factor_at(step)
                reasons[ranks] = HW_THERMAL_SLOWDOWN
        clock_noise, power_noise = 1 + JITTER_RATIO * rng.standard_normal((2, num_ranks))
        clock_hz = CLOCK_HZ * clock_noise / slower
        return np.stack((clock_hz, POWER_W * power_noise / slower, reasons))

    def _counted(self, step: int) -> NDArray[np.float64]:
        effects, scenario = self._cluster.effects, self._cluster.scenario
        rng = stream(scenario.seed, Purpose.SAMPLES, step, 1)
        rates = np.repeat(np.array(HEALTHY_RATES)[:, None], scenario.world_size, axis=1)
        for number, fault in enumerate(scenario.faults):
            if number in effects.slow_hosts and effects.is_degraded(number, step):
                counter = COUNTER_OF_REASON[fault.reason]
                rates[counter, list(effects.ranks_of(number))] += DEGRADED_RATES[counter]
        self._counts = self._counts + rng.poisson(rates)
        return self._counts


SHORTEST_PERIOD_S = 300.0


LONGEST_PERIOD_S = 1_800.0
"""Bounds of the period of a clock error: temperature and corrections change over minutes."""


KNOT_NS = 10_000_000_000
"""Distance of the moments at which the error is computed; it is linear between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostClocks:
    """Errors of the hosts' clocks after alignment, unknown to the analysis.

    ::

        offset(t) = clock_error / 2 * sin(2 pi (t / period + phase))
    """

    clock_error_ns: int
    """Largest difference of two clocks."""

    period_s: NDArray[np.float64]
    """Shape (hosts,)."""

    phase: NDArray[np.float64]

    def offset_ns(self, at_ns: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the clock error of each host, shape (times, hosts).

        Args:
            at_ns: Shape (times,): true time from the start of the run.
        """
        turn = at_ns[:, None] / NS_PER_S / self.period_s + self.phase
        offset: NDArray[np.float64] = self.clock_error_ns / 2 * np.sin(2 * np.pi * turn)
        return offset

    def read_ns(self, true_ns: NDArray[np.int64], host: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the time on the clock of ``host`` at true times, of equal shape."""
        if not self.clock_error_ns or not len(true_ns):
            return true_ns
        first, last = int(true_ns.min()) // KNOT_NS, int(true_ns.max()) // KNOT_NS + 1
        offset = self.offset_ns(np.arange(first, last + 1) * KNOT_NS)
        knot, since = np.divmod(true_ns, KNOT_NS)
        before, after = offset[knot - first, host], offset[knot - first + 1, host]
        ahead = np.rint(before + (after - before) * (since / KNOT_NS))
        read: NDArray[np.int64] = true_ns + ahead.astype(np.int64)
        return read


def make_clocks(scenario: Scenario) -> HostClocks:
    """Return random clocks for the hosts of a scenario."""
    rng = stream(scenario.seed, Purpose.CLOCKS)
    return HostClocks(
        clock_error_ns=scenario.noise.clock_error_ns,
        period_s=rng.uniform(SHORTEST_PERIOD_S, LONGEST_PERIOD_S, scenario.num_hosts),
        phase=rng.random(scenario.num_hosts),
    )
