"""Counters of RDMA ports (InfiniBand, RoCE, EFA), from sysfs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .sample import PART_MARK, CounterTotals, Sample, SourceAbsentError, read_number, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path("/sys/class/infiniband")

BYTES_PER_WORD = 4
SENT_BYTES = "rdma-sent-bytes"
RECEIVED_BYTES = "rdma-received-bytes"

PORT_COUNTERS = {
    "port_xmit_data": (SENT_BYTES, BYTES_PER_WORD),
    "port_rcv_data": (RECEIVED_BYTES, BYTES_PER_WORD),
    "port_xmit_packets": ("rdma-sent-packets", 1),
    "port_rcv_packets": ("rdma-received-packets", 1),
    "port_xmit_wait": ("rdma-transmit-wait-ticks", 1),
    "symbol_error": ("rdma-symbol-errors", 1),
    "port_rcv_errors": ("rdma-receive-errors", 1),
    "port_xmit_discards": ("rdma-discarded-packets", 1),
    "link_error_recovery": ("rdma-link-recovery-events", 1),
    "link_downed": ("link-down-events", 1),
}
"""File below ``counters`` -> (name, factor from the file's unit to the name's).
Source: InfiniBand architecture, PortCounters; Linux, ``drivers/infiniband/core/sysfs.c``: data is
in words of 4 bytes."""

DRIVER_COUNTERS = {
    "np_ecn_marked_roce_packets": "rdma-ecn-marked-packets",
    "np_cnp_sent": "rdma-cnp-sent-packets",
    "rp_cnp_handled": "rdma-cnp-handled-packets",
    "rp_cnp_ignored": "rdma-cnp-ignored-packets",
    "out_of_sequence": "rdma-out-of-sequence-packets",
    "packet_seq_err": "rdma-sequence-nak-packets",
    "local_ack_timeout_err": "rdma-ack-timeout-events",
    "roce_adp_retrans": "rdma-adaptive-retransmit-events",
    "roce_adp_retrans_to": "rdma-adaptive-retransmit-timeout-events",
    "roce_slow_restart_cnps": "rdma-slow-restart-cnp-packets",
    "rnr_nak_retry_err": "rdma-receiver-not-ready-events",
    "out_of_buffer": "rdma-out-of-buffer-packets",
    "retrans_pkts": "rdma-retransmitted-packets",
    "retrans_timeout_events": "rdma-retransmit-timeout-events",
    "tx_bytes": SENT_BYTES,
    "rx_bytes": RECEIVED_BYTES,
}
"""File below ``hw_counters`` -> name: of mlx5 (ConnectX), then of EFA.
Source: the drivers' counter lists, ``mlx5/counters.c`` and ``efa_verbs.c`` of Linux."""

NARROW = {
    "symbol_error": 0xFFFF,
    "port_rcv_errors": 0xFFFF,
    "port_xmit_discards": 0xFFFF,
    "link_error_recovery": 0xFF,
    "link_downed": 0xFF,
    "port_xmit_wait": 0xFFFF_FFFF,
    "port_xmit_data": 0xFFFF_FFFF,
    "port_rcv_data": 0xFFFF_FFFF,
    "port_xmit_packets": 0xFFFF_FFFF,
    "port_rcv_packets": 0xFFFF_FFFF,
}
"""Largest values of counters that saturate on some devices. From then on the count is unknown.
Source: as `PORT_COUNTERS`."""

ACTIVE_STATE = 4
STATE_NAME = "rdma-port-is-active"


class RdmaSource:
    """Counters of all ports of all RDMA devices."""

    name = "rdma"

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._totals = CounterTotals()

    def read(self, at_ns: int) -> list[Sample]:
        """Return the growth of each counter since the first reading, and each port's state.

        Raises:
            SourceAbsentError: The host has no RDMA device.
        """
        ports = sorted(self._root.glob("*/ports/*"))
        if not ports:
            raise SourceAbsentError(f"no RDMA device under {self._root}: no RDMA samples")
        states = []
        for port in ports:
            label = f"{port.parents[1].name}/{port.name}"
            for name, raw, scale in self._counters(port):
                self._totals.add_reading(name, label, raw, scale=scale)
            state = (read_text(port / "state") or "").partition(":")[0]  # "4: ACTIVE"
            if state.isascii() and state.isdigit():
                is_active = float(int(state) == ACTIVE_STATE)
                states.append(Sample(at_ns, f"{STATE_NAME}{PART_MARK}{label}", is_active))
        return self._totals.samples(at_ns) + states

    def traffic_bytes(self) -> tuple[int, int] | None:
        """Return (sent, received) bytes since the first reading; None if unknown."""
        sent, received = self._totals.total(SENT_BYTES), self._totals.total(RECEIVED_BYTES)
        return None if sent is None or received is None else (sent, received)

    def _counters(self, port: Path) -> Iterator[tuple[str, int, int]]:
        """Yield (name, reading, scale) of this port's counters, each name once."""
        seen = set()
        for file, (name, scale) in PORT_COUNTERS.items():
            raw = read_number(port / "counters" / file)
            if raw is not None and raw >= 0 and raw != NARROW.get(file):
                seen.add(name)
                yield name, raw, scale
        for file, name in DRIVER_COUNTERS.items():
            if name in seen:
                continue
            raw = read_number(port / "hw_counters" / file)
            if raw is not None and raw >= 0:
                yield name, raw, 1
