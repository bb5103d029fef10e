"""What the hosts' monitors read of devices and network adapters, once a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..faults.spec import FaultCause, NetworkReason
from .chance import Purpose, stream
from .placement import host_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .cluster import Cluster

CLOCK_HZ = 1.755e9
POWER_W = 620.0
JITTER_RATIO = 0.003
HW_THERMAL_SLOWDOWN = 0x40
"""Source: NVML, ``nvmlClocksEventReasonHwThermalSlowdown``."""

GAUGES = ("gpu-clock-hz", "gpu-power-w", "gpu-throttle-reasons")
COUNTERS = ("rdma-ecn-marked-packets", "rdma-retransmitted-packets", "link-down-events")
"""Counters only grow; each belongs to the adapter beside the device."""

COUNTER_OF_REASON = {
    NetworkReason.CONGESTION: 0,
    NetworkReason.RETRANSMIT: 1,
    NetworkReason.FLAP: 2,
}
HEALTHY_RATES = (40.0, 0.5, 0.0)
"""Mean growth of each counter in a step."""

DEGRADED_RATES = (40_000.0, 4_000.0, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleColumns:
    """Readings, by name, host and device."""

    host: NDArray[np.int32]
    """Codes into ``hosts``."""

    device: NDArray[np.int32]
    """Local rank."""

    at_ns: NDArray[np.int64]
    """Unix time."""

    name: NDArray[np.int32]
    """Codes into ``names``."""

    value: NDArray[np.float64]
    hosts: tuple[str, ...]
    names: tuple[str, ...]


class Monitors:
    """Reads gauges and counts counters on over the steps."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._counts = np.zeros((len(COUNTERS), cluster.scenario.world_size))
        self._hosts = tuple(host_name(host) for host in range(cluster.scenario.num_hosts))

    def read(self, step: int, *, at_ns: int) -> SampleColumns:
        """Return all readings in the middle of a step.

        Args:
            step: The step.
            at_ns: Unix time.
        """
        place = self._cluster.placement
        values = np.concatenate((self._gauges(step), self._counted(step)))
        names = GAUGES + COUNTERS if self._cluster.scenario.record_samples else ()
        values = values[: len(names)]
        return SampleColumns(
            host=np.tile(place.host, len(names)),
            device=np.tile(place.local_rank, len(names)),
            at_ns=np.full(values.size, at_ns, dtype=np.int64),
            name=np.repeat(np.arange(len(names), dtype=np.int32), len(place.host)),
            value=values.ravel(),
            hosts=self._hosts,
            names=names,
        )

    def _gauges(self, step: int) -> NDArray[np.float64]:
        """Return clock, power and throttle reasons of each rank's device.

        A device whose clock is throttled takes as much longer as its clock is
        lower; power falls with the clock.
        """
        num_ranks = self._cluster.scenario.world_size
        rng = stream(self._cluster.scenario.seed, Purpose.SAMPLES, step)
        slower, reasons = np.ones(num_ranks), np.zeros(num_ranks)
        for number, fault in enumerate(self._cluster.scenario.faults):
            if fault.cause is FaultCause.CLOCK_THROTTLE and fault.is_active(step):
                ranks = list(self._cluster.effects.ranks_of(number))
                slower[ranks] *= fault.factor
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
