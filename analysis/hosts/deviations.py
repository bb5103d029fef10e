"""Readings of a finding's hosts and devices that deviate from those of their peers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NONE, NS_PER_MS

from ..report.text import format_bytes, format_count, format_percent
from ..statistics.noise import required_deviations, robust_deviation
from ..statistics.thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ..trace.context import SampleTable

PART_MARK = ":"
PROCESS = "process-cpu-cores"
STORAGE = "process-storage-bytes-per-s"
MEMORY = "process-memory-bytes"
QUEUE = "run-queue-wait-ratio"
PRESSURE = "{}-pressure-ratio"
MIN_READINGS = 10
"""Readings of the same series in other steps, one a second, without which they are no baseline.
Source: choice."""

MIN_CORES = 0.25
"""CPUs from which a process may be why a rank had none. Source: choice."""

LEAST = {PROCESS: MIN_CORES, STORAGE: 1 << 20, MEMORY: 1 << 28}
"""What a process must take at least, in the unit of its reading. Source: choice, as the least
differences of swap."""

MAX_PROCESSES = 3
MAX_PEERS = 256
MIN_COUNT = 1.0


class Side(Enum):
    """The side on which a reading is bad."""

    LOW = -1
    HIGH = 1


class Unit(Enum):
    """Unit of a reading, with its format."""

    HZ = "Hz"
    WATT = "W"
    CELSIUS = "C"
    RATIO = "%"
    BYTES = "bytes"
    BYTES_PER_S = "bytes/s"
    NS = "ns"
    NUMBER = ""
    PER_S = "/s"

    def format(self, value: float) -> str:
        """Return a value with three digits and its unit."""
        if self in FORMATS:
            return FORMATS[self](value)
        return f"{value:.4g}{f' {self.value}' if self.value else ''}"


FORMATS: dict[Unit, Callable[[float], str]] = {
    Unit.RATIO: format_percent,
    Unit.BYTES: lambda value: format_bytes(round(value)),
    Unit.BYTES_PER_S: lambda value: f"{format_bytes(round(value))}/s",
    Unit.NS: lambda value: f"{value / NS_PER_MS:.3g} ms",
    Unit.HZ: lambda value: f"{value / 1e9:.3g} GHz",
    Unit.PER_S: lambda value: f"{value:.3g}/s",
}


@dataclass(frozen=True, slots=True)
class Quantity:
    """A reading that says something if it deviates."""

    words: str
    unit: Unit
    side: Side
    floor: float
    """Least difference that matters, in its unit; of a counter, the least growth."""

    is_counter: bool = False


def _words(name: str) -> str:
    """Return the name of a counter for a reader: "RDMA retransmitted packets"."""
    first, _, rest = name.partition("-")
    known = {"nic": "NIC", "rdma": "RDMA", "tcp": "TCP"}
    return f"{known.get(first, first)} {rest.replace('-', ' ').replace('ecn', 'ECN')}"


def _counter(words: str) -> Quantity:
    return Quantity(words, Unit.PER_S, Side.HIGH, MIN_COUNT, is_counter=True)


QUANTITIES: dict[str, Quantity] = {
    "run-queue-wait-ratio": Quantity("time in wait for a CPU", Unit.RATIO, Side.HIGH, 0.05),
    "gpu-clock-hz": Quantity("GPU clock", Unit.HZ, Side.LOW, 0.0),
    "gpu-memory-clock-hz": Quantity("GPU memory clock", Unit.HZ, Side.LOW, 0.0),
    "gpu-power-w": Quantity("GPU power", Unit.WATT, Side.LOW, 0.0),
    "gpu-power-limit-w": Quantity("GPU power limit", Unit.WATT, Side.LOW, 0.0),
    "gpu-temperature-c": Quantity("GPU temperature", Unit.CELSIUS, Side.HIGH, 5.0),
    "gpu-ecc-corrected-errors": _counter("corrected ECC errors"),
    "gpu-ecc-uncorrected-errors": _counter("uncorrected ECC errors"),
    "gpu-remapped-rows": Quantity("remapped rows", Unit.NUMBER, Side.HIGH, MIN_COUNT),
    "gpu-remapping-is-pending": Quantity("pending row remap", Unit.NUMBER, Side.HIGH, MIN_COUNT),
    "gpu-remapping-has-failed": Quantity("failed row remap", Unit.NUMBER, Side.HIGH, MIN_COUNT),
    "gpu-pcie-lanes": Quantity("PCIe lanes", Unit.NUMBER, Side.LOW, MIN_COUNT),
    "gpu-pcie-generation": Quantity("PCIe generation", Unit.NUMBER, Side.LOW, MIN_COUNT),
    "gpu-pcie-replay-events": _counter("PCIe replays"),
    "gpu-nvlink-active-links": Quantity("active NVLinks", Unit.NUMBER, Side.LOW, MIN_COUNT),
    "gpu-nvlink-crc-flit-errors": _counter("NVLink CRC errors"),
    "gpu-nvlink-crc-data-errors": _counter("NVLink CRC errors of data"),
    "gpu-nvlink-replay-errors": _counter("NVLink replays"),
    "gpu-nvlink-recovery-errors": _counter("NVLink recoveries"),
    "cpu-busy-ratio": Quantity("CPUs busy", Unit.RATIO, Side.HIGH, 0.1),
    "cpu-frequency-hz": Quantity("CPU frequency", Unit.HZ, Side.LOW, 0.0),
    "cpu-pressure-ratio": Quantity("CPU pressure", Unit.RATIO, Side.HIGH, 0.05),
    "memory-pressure-ratio": Quantity("memory pressure", Unit.RATIO, Side.HIGH, 0.05),
    "io-pressure-ratio": Quantity("I/O pressure", Unit.RATIO, Side.HIGH, 0.05),
    "memory-available-bytes": Quantity("available memory", Unit.BYTES, Side.LOW, 1 << 30),
    "swap-used-bytes": Quantity("swap used", Unit.BYTES, Side.HIGH, 1 << 28),
    "swap-in-bytes": Quantity("swapped in", Unit.BYTES_PER_S, Side.HIGH, 1 << 20, is_counter=True),
    "swap-out-bytes": Quantity(
        "swapped out", Unit.BYTES_PER_S, Side.HIGH, 1 << 20, is_counter=True
    ),
    "disk-free-bytes": Quantity("free disk space", Unit.BYTES, Side.LOW, 1 << 30),
    "disk-read-latency-ns": Quantity("disk read latency", Unit.NS, Side.HIGH, NS_PER_MS),
    "disk-write-latency-ns": Quantity("disk write latency", Unit.NS, Side.HIGH, NS_PER_MS),
    "nic-speed-bytes-per-s": Quantity("adapter speed", Unit.BYTES_PER_S, Side.LOW, 0.0),
    "nic-link-is-up": Quantity("links up", Unit.NUMBER, Side.LOW, 0.1),
    "rdma-port-is-active": Quantity("RDMA ports active", Unit.NUMBER, Side.LOW, 0.1),
    **{
        name: _counter(_words(name))
        for name in (
            "nic-receive-errors",
            "nic-transmit-errors",
            "nic-dropped-packets",
            "nic-discarded-packets",
            "nic-symbol-errors",
            "nic-link-down-events",
            "nic-pause-received-frames",
            "nic-pause-sent-frames",
            "nic-ecn-marked-packets",
            "tcp-resent-segments",
            "link-down-events",
            "rdma-symbol-errors",
            "rdma-receive-errors",
            "rdma-discarded-packets",
            "rdma-link-recovery-events",
            "rdma-transmit-wait-ticks",
            "rdma-ecn-marked-packets",
            "rdma-cnp-handled-packets",
            "rdma-out-of-sequence-packets",
            "rdma-sequence-nak-packets",
            "rdma-ack-timeout-events",
            "rdma-adaptive-retransmit-events",
            "rdma-adaptive-retransmit-timeout-events",
            "rdma-retransmitted-packets",
            "rdma-retransmit-timeout-events",
            "rdma-receiver-not-ready-events",
            "rdma-out-of-buffer-packets",
        )
    },
}
"""By name without a part. What has no bad side, such as traffic, is not compared."""

OF_PARTS = ("disk-", "nic-speed-", "nic-link-is-", "rdma-port-is-")
"""Beginnings of quantities that have readings of parts only."""

THROTTLE_REASONS = {
    0x2: "applications clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}
"""Source: NVML, ``nvmlClocksEventReason*``."""

KINDS = {
    "GPU": ("gpu-",),
    "CPU": ("run-queue-", "cpu-"),
    "network": ("nic-", "rdma-"),
    "disk": ("disk-", "io-"),
}
"""What is measured, by the beginnings of the names of its readings."""

Place = tuple[str, int]
"""Host and local rank of a device; -1: the host as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A reading of a culprit that deviates."""

    name: str
    place: Place
    text: str
    """"GPU clock 1.35 GHz, peers 1.76 GHz"."""


@dataclass(frozen=True, slots=True)
class _Series:
    """Readings of one name at one place."""

    at_ns: NDArray[np.int64]
    value: NDArray[np.float64]

    def level(self, within: NDArray[np.bool_], *, is_counter: bool) -> float | None:
        """Return the median of its values in a time, or what the counter grew by per second."""
        if not is_counter:
            return float(np.median(self.value[within])) if within.any() else None
        grown = np.maximum(np.diff(self.value), 0.0)
        both = within[1:] & within[:-1]
        lasted_s = float(np.diff(self.at_ns)[both].sum()) / 1e9
        return float(grown[both].sum()) / lasted_s if lasted_s > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReadings:
    """The samples of a run's hosts, and a time within them.

    Args:
        samples: Of the run.
        begin_ns: First and last Unix time of a finding.
        places: Host and local rank of each rank.
    """

    samples: SampleTable
    begin_ns: int
    end_ns: int
    places: Mapping[int, Place]

    def deviations(self, ranks: Collection[int]) -> list[Deviation]:
        """Return the readings of these ranks' devices and hosts that deviate from their peers'.

        A reading is compared with those of at least `min_peers` other devices, or hosts, in the
        same time; with fewer, with its own in other steps. It deviates if it is worse than their
        median by more than chance explains (`required_deviations` times their robust deviation),
        by `min_excess_ratio` of it, and by the least that matters.
        """
        culprits = {self.places[rank] for rank in ranks if rank in self.places}
        found = []
        for code, name in enumerate(self.samples.names):
            plain, _, part = name.partition(PART_MARK)
            quantity = QUANTITIES.get(plain)
            if plain == "gpu-throttle-reasons":
                found += self._throttled(code, culprits)
            if quantity is None or (part and not plain.startswith(OF_PARTS)):
                continue
            own, others = self._sides(code, culprits)
            found += self._compare(name, quantity, own, others)[:1]
        return found

    def queue_wait(self, ranks: Collection[int]) -> tuple[float | None, float | None]:
        """Return for which share of the time these ranks, and the median other rank, had no CPU.

        None if it was not read.
        """
        if QUEUE not in self.samples.names:
            return None, None
        culprits = {self.places[rank] for rank in ranks if rank in self.places}
        own, others = self._sides(self.samples.names.index(QUEUE), culprits)
        levels = [
            [one.level(self._within(one.at_ns), is_counter=False) for one in side]
            for side in (own.values(), others)
        ]
        known = ([level for level in side if level is not None] for side in levels)
        mine, usual = (float(np.median(side)) if side else None for side in known)
        return mine, usual

    def pressure(self, hosts: Collection[str], what: str) -> float | None:
        """Return for which share of the time some process of these hosts waited for something.

        None if it was not read.

        Args:
            what: "cpu", "memory" or "io".
        """
        name = PRESSURE.format(what)
        if name not in self.samples.names:
            return None
        bounds = self._bounds(self.samples.names.index(name))
        levels = [
            one.level(self._within(one.at_ns), is_counter=False)
            for _, one in self._series(bounds, self._of_hosts(bounds, hosts))
        ]
        return max((level for level in levels if level is not None), default=None)

    def processes(
        self, hosts: Collection[str], of: str = PROCESS
    ) -> list[tuple[str, str, float, float | None]]:
        """Return the processes that belong to no rank and took most of these hosts, most first.

        Processes of one command count together, and have the name of the one that took most of it.
        What takes as much on the median other host is not among them: it distinguishes no host.

        Args:
            of: Readings that say what processes take: a name of `LEAST`.

        Returns:
            Host, name, mean over the readings in the time, and over those in other steps (None
            without any).
        """
        names = self.samples.names
        codes = [c for c, name in enumerate(names) if name.startswith(of + PART_MARK)]
        times: dict[str, NDArray[np.int64]] = {}
        rows_of = {}
        for code in codes:
            bounds = self._bounds(code)
            rows_of[code] = [*self._series(bounds, self._of_hosts(bounds, hosts))]
        for host in hosts:
            at_ns = [one.at_ns for rows in rows_of.values() for (on, _), one in rows if on == host]
            times[host] = np.unique(np.concatenate(at_ns)) if at_ns else np.zeros(0, np.int64)
        sums: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
        for code in codes:
            name = names[code].partition(PART_MARK)[2]
            for (host, device), one in rows_of[code]:
                if host in times and device == NONE:
                    within = self._within(one.at_ns)
                    now, other = float(one.value[within].sum()), float(one.value[~within].sum())
                    sums.setdefault((host, _command(name)), []).append((now, other, name))
        found = []
        for (host, command), parts in sums.items():
            num_in = int(self._within(times[host]).sum())
            num_out = len(times[host]) - num_in
            now, other = sum(part[0] for part in parts), sum(part[1] for part in parts)
            taken = now / num_in if num_in else 0.0
            before = other / num_out if num_out else None
            if taken >= LEAST[of]:
                most, _, name = max(parts)
                is_one = most > THRESHOLDS.majority_share * now
                found.append((host, name if is_one else command, taken, before))
        usual = self._taken_elsewhere({_command(name) for _, name, _, _ in found}, codes, hosts)
        own = [
            each
            for each in found
            if each[2] >= THRESHOLDS.peer_peak_factor * usual.get(_command(each[1]), 0.0)
        ]
        return sorted(own, key=lambda each: -each[2])[:MAX_PROCESSES]

    def _taken_elsewhere(
        self, commands: Collection[str], codes: Sequence[int], hosts: Collection[str]
    ) -> dict[str, float]:
        """Return what each command takes of the median other host in the time."""
        samples = self.samples
        if not commands:
            return {}
        ends = np.searchsorted(samples.name, [[code, code + 1] for code in codes])
        rows = np.concatenate([np.arange(*pair) for pair in ends.tolist()])
        own = [samples.hosts.index(host) for host in hosts if host in samples.hosts]
        rows = rows[self._within(samples.at_ns[rows]) & ~np.isin(samples.host[rows], own)]
        others = np.unique(samples.host[rows])
        if not len(others):
            return {}
        others = others[np.unique(np.linspace(0, len(others) - 1, MAX_PEERS).round().astype(int))]
        rows = rows[np.isin(samples.host[rows], others)]
        rounds = np.unique(np.stack((samples.host[rows], samples.at_ns[rows])), axis=1)
        num_rounds = np.bincount(np.searchsorted(others, rounds[0]), minlength=len(others))
        rows = rows[samples.device[rows] == NONE]
        column = np.searchsorted(others, samples.host[rows])
        usual = {}
        command_of = {c: _command(samples.names[c].partition(PART_MARK)[2]) for c in codes}
        for command in commands:
            is_of_it = np.isin(samples.name[rows], [c for c in codes if command_of[c] == command])
            taken = np.bincount(
                column[is_of_it], weights=samples.value[rows][is_of_it], minlength=len(others)
            )
            usual[command] = float(np.median(taken / num_rounds))
        return usual

    def not_measured(self, kinds: Collection[str], hosts: Collection[str]) -> dict[str, list[str]]:
        """Return the hosts of which there is no reading of a kind, by that kind of `KINDS`."""
        samples, missing = self.samples, {}
        within = self._within(samples.at_ns)
        for kind in kinds:
            codes = [c for c, name in enumerate(samples.names) if name.startswith(KINDS[kind])]
            rows = np.isin(samples.name, codes) & within
            seen = {samples.hosts[host] for host in np.unique(samples.host[rows]).tolist()}
            if unseen := sorted(set(hosts) - seen):
                missing[kind] = unseen
        return missing

    def _within(self, at_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
        within: NDArray[np.bool_] = (at_ns >= self.begin_ns) & (at_ns <= self.end_ns)
        return within

    def _bounds(self, code: int) -> NDArray[np.int64]:
        """Return where each place's readings of a name begin in the table, and the end of all."""
        samples = self.samples
        first, last = np.searchsorted(samples.name, [code, code + 1]).tolist()
        host, device = samples.host[first:last], samples.device[first:last]
        changes = np.flatnonzero((np.diff(host) != 0) | (np.diff(device) != 0)) + 1
        begins = [0] if first < last else []
        bounds: NDArray[np.int64] = first + np.concatenate((begins, changes, [last - first]))
        return bounds.astype(np.int64)

    def _of_hosts(self, bounds: NDArray[np.int64], hosts: Collection[str]) -> NDArray[np.bool_]:
        codes = [self.samples.hosts.index(host) for host in hosts if host in self.samples.hosts]
        is_there: NDArray[np.bool_] = np.isin(self.samples.host[bounds[:-1]], codes)
        return is_there

    def _series(
        self, bounds: NDArray[np.int64], chosen: NDArray[np.bool_]
    ) -> Iterator[tuple[Place, _Series]]:
        """Yield the readings of one name at the chosen places, in order of time."""
        samples = self.samples
        for number in np.flatnonzero(chosen).tolist():
            begin, end = bounds[number : number + 2].tolist()
            place = (samples.hosts[samples.host[begin]], int(samples.device[begin]))
            yield place, _Series(samples.at_ns[begin:end], samples.value[begin:end])

    def _sides(
        self, code: int, culprits: Collection[Place]
    ) -> tuple[dict[Place, _Series], list[_Series]]:
        """Return the readings of one name of culprits and their hosts, and of others.

        Of many others, `MAX_PEERS` are taken, evenly spaced: a median of more differs little.
        """
        bounds = self._bounds(code)
        on_hosts = self._of_hosts(bounds, {host for host, _ in culprits})
        near = dict(self._series(bounds, on_hosts))
        own = {place: one for place, one in near.items() if place[1] == NONE or place in culprits}
        others = [one for place, one in near.items() if place not in own]
        far = np.flatnonzero(~on_hosts)
        taken = np.zeros(len(on_hosts), dtype=np.bool_)
        if len(far):
            spread = np.linspace(0, len(far) - 1, min(len(far), MAX_PEERS))
            taken[far[spread.round().astype(np.int64)]] = True
        return own, [*others, *(one for _, one in self._series(bounds, taken))]

    def _compare(
        self, name: str, quantity: Quantity, own: Mapping[Place, _Series], others: list[_Series]
    ) -> list[Deviation]:
        """Return the culprits that deviate, the furthest first."""
        levels = [
            one.level(self._within(one.at_ns), is_counter=quantity.is_counter) for one in others
        ]
        peers = np.array([level for level in levels if level is not None])
        found: list[tuple[float, Deviation]] = []
        for place, one in own.items():
            within = self._within(one.at_ns)
            value = one.level(within, is_counter=quantity.is_counter)
            if value is None:
                continue
            usual, against = peers, "peers"
            if len(peers) < THRESHOLDS.min_peers:
                usual, against = _elsewhere(one, ~within, quantity), "in other steps"
            if not len(usual):
                continue
            middle = float(np.median(usual))
            noise = required_deviations(len(usual)) * robust_deviation(usual)
            lasted_s = max(self.end_ns - self.begin_ns, 1) / 1e9
            floor = quantity.floor / (lasted_s if quantity.unit is Unit.PER_S else 1.0)
            least = max(noise, THRESHOLDS.min_excess_ratio * abs(middle), floor)
            excess = (value - middle) * quantity.side.value
            if excess < least or excess <= 0:
                continue
            part = name.partition(PART_MARK)[2]
            words = f"{quantity.words}{f' of {part}' if part else ''}"
            text = (
                f"{words} {quantity.unit.format(value)}, {against} {quantity.unit.format(middle)}"
            )
            ratio = excess / max(abs(middle), least)
            found.append((ratio, Deviation(name=name, place=place, text=text)))
        found.sort(key=lambda each: -each[0])
        return [deviation for _, deviation in found]

    def _throttled(self, code: int, culprits: Collection[Place]) -> list[Deviation]:
        """Return the throttle reasons that culprits have in most readings, and most others not."""
        own, peers = self._sides(code, culprits)
        others = [share for one in peers if (share := self._reason_shares(one))]
        if not others:
            return []
        for place, one in own.items():
            mine = self._reason_shares(one)
            reasons = [
                words
                for bit, words in THROTTLE_REASONS.items()
                if mine.get(bit, 0.0) > THRESHOLDS.majority_share
                and sum(share[bit] > THRESHOLDS.majority_share for share in others)
                <= THRESHOLDS.majority_share * len(others)
            ]
            if reasons:
                num = format_count(len(others), "other device")
                text = f"clock throttled by {' and '.join(reasons)}, most of {num} are not"
                return [Deviation(name="gpu-throttle-reasons", place=place, text=text)]
        return []

    def _reason_shares(self, one: _Series) -> dict[int, float]:
        bits = one.value[self._within(one.at_ns)].astype(np.int64)
        return {bit: float(((bits & bit) != 0).mean()) for bit in THROTTLE_REASONS if len(bits)}


def _elsewhere(one: _Series, outside: NDArray[np.bool_], quantity: Quantity) -> NDArray[np.float64]:
    """Return what a series was in other steps; nothing if there are too few readings."""
    if int(outside.sum()) < MIN_READINGS:
        return np.zeros(0)
    if not quantity.is_counter:
        return one.value[outside]
    both = outside[1:] & outside[:-1]
    lasted_s = np.diff(one.at_ns)[both] / 1e9
    rates: NDArray[np.float64] = np.maximum(np.diff(one.value), 0.0)[both] / np.maximum(
        lasted_s, 1e-9
    )
    return rates


def _command(process: str) -> str:
    """Return the command of a process: of `stress-ng[4242]`, "stress-ng"."""
    command, bracket, pid = process.rpartition("[")
    return command if bracket and pid.removesuffix("]").isdigit() else process
