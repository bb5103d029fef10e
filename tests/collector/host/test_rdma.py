"""RDMA samples, with sysfs trees of ConnectX-7 (RoCE), ConnectX-6 (InfiniBand) and EFA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.host.rdma import RdmaSource
from rankscope.collector.host.sample import SourceAbsentError

if TYPE_CHECKING:
    from pathlib import Path

ROCE_COUNTERS = {
    "port_xmit_data": 1_000_000,
    "port_rcv_data": 2_000_000,
    "port_xmit_packets": 5_000,
    "port_rcv_packets": 6_000,
    "port_xmit_wait": 70,
    "symbol_error": 0,
    "port_rcv_errors": 0,
    "port_xmit_discards": 0,
    "link_error_recovery": 0,
    "link_downed": 1,
}
ROCE_DRIVER = {
    "np_ecn_marked_roce_packets": 400,
    "np_cnp_sent": 390,
    "rp_cnp_handled": 12,
    "out_of_sequence": 3,
    "packet_seq_err": 2,
    "local_ack_timeout_err": 1,
    "roce_adp_retrans": 9,
    "rx_read_requests": 77,
}


def port(root: Path, device: str, number: int = 1, *, state: str = "4: ACTIVE") -> Path:
    folder = root / device / "ports" / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state").write_text(f"{state}\n")
    return folder


def write(folder: Path, counters: dict[str, int | str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, value in counters.items():
        (folder / name).write_text(f"{value}\n")


def read(source: RdmaSource) -> dict[str, float]:
    return {sample.name: sample.value for sample in source.read(5)}


def roce(root: Path, device: str = "mlx5_0") -> Path:
    folder = port(root, device)
    write(folder / "counters", dict(ROCE_COUNTERS))
    write(folder / "hw_counters", dict(ROCE_DRIVER))
    return folder


def test_a_roce_port_returns_growth_since_the_first_reading(tmp_path: Path) -> None:
    # GIVEN
    folder = roce(tmp_path)
    source = RdmaSource(tmp_path)
    source.read(0)

    # WHEN
    write(folder / "counters", {"port_xmit_data": 1_000_250, "link_downed": 2})
    write(
        folder / "hw_counters",
        {
            "np_ecn_marked_roce_packets": 450,
            "out_of_sequence": 10,
            "local_ack_timeout_err": 3,
            "roce_adp_retrans": 14,
        },
    )
    found = read(source)

    # THEN
    assert found["rdma-sent-bytes"] == 1000  # 250 words of 4 bytes
    assert found["rdma-ecn-marked-packets"] == 50
    assert found["rdma-out-of-sequence-packets"] == 7
    assert found["rdma-ack-timeout-events"] == 2
    assert found["rdma-adaptive-retransmit-events"] == 5
    assert found["link-down-events"] == 1
    assert found["rdma-cnp-sent-packets"] == 0
    assert found["rdma-port-is-active:mlx5_0/1"] == 1
    assert source.traffic_bytes() == (1000, 0)


def test_ports_of_several_devices_are_summed(tmp_path: Path) -> None:
    folders = [roce(tmp_path, "mlx5_0"), roce(tmp_path, "mlx5_1")]
    source = RdmaSource(tmp_path)
    source.read(0)

    for growth, folder in zip((4, 6), folders, strict=True):
        write(folder / "hw_counters", {"np_cnp_sent": 390 + growth})
    found = read(source)

    assert found["rdma-cnp-sent-packets"] == 10
    assert found["rdma-cnp-sent-packets:mlx5_0/1"] == 4
    assert found["rdma-cnp-sent-packets:mlx5_1/1"] == 6


def test_missing_unreadable_and_unsupported_counters_are_unknown_not_zero(tmp_path: Path) -> None:
    # GIVEN: no hw_counters at all, one N/A, one empty, one a folder, one negative
    folder = port(tmp_path, "ibp1s0", state="1: DOWN")
    write(
        folder / "counters",
        {
            "port_xmit_data": "N/A (no PMA)",
            "port_rcv_data": "",
            "port_rcv_packets": -1,
            "port_rcv_errors": 5,
        },
    )
    (folder / "counters" / "symbol_error").mkdir()

    # WHEN
    source = RdmaSource(tmp_path)
    found = read(source)

    # THEN
    assert found == {
        "rdma-receive-errors": 0.0,
        "rdma-receive-errors:ibp1s0/1": 0.0,
        "rdma-port-is-active:ibp1s0/1": 0.0,
    }
    assert source.traffic_bytes() is None


def test_a_saturated_counter_is_unknown(tmp_path: Path) -> None:
    folder = port(tmp_path, "mlx4_0")
    write(folder / "counters", {"symbol_error": 65535, "link_downed": 255, "port_rcv_errors": 254})

    found = read(RdmaSource(tmp_path))

    assert "rdma-symbol-errors" not in found
    assert "link-down-events" not in found
    assert found["rdma-receive-errors"] == 0


@pytest.mark.parametrize("odd", [2**64 - 1, 2**64, "9" * 30, "9" * 400, "9" * 4_000, -(2**63) - 1])
def test_an_impossible_reading_is_unknown(tmp_path: Path, odd: int | str) -> None:
    # GIVEN a counter that was read twice
    folder = port(tmp_path, "mlx5_0")
    write(folder / "hw_counters", {"out_of_sequence": 3})
    source = RdmaSource(tmp_path)
    source.read(0)
    write(folder / "hw_counters", {"out_of_sequence": 5})
    assert read(source)["rdma-out-of-sequence-packets"] == 2

    # WHEN the device disappears from the bus for a moment
    write(folder / "hw_counters", {"out_of_sequence": odd})
    assert read(source)["rdma-out-of-sequence-packets"] == 2

    # THEN the count continues afterwards
    write(folder / "hw_counters", {"out_of_sequence": 6})
    assert read(source)["rdma-out-of-sequence-packets"] == 3


def test_an_efa_device_returns_bytes_and_retransmits(tmp_path: Path) -> None:
    folder = port(tmp_path, "rdmap16s27")
    write(folder / "hw_counters", {"tx_bytes": 100, "rx_bytes": 10, "retrans_pkts": 5})
    source = RdmaSource(tmp_path)
    source.read(0)

    write(folder / "hw_counters", {"tx_bytes": 164, "rx_bytes": 11, "retrans_pkts": 8})
    found = read(source)

    assert (found["rdma-sent-bytes"], found["rdma-received-bytes"]) == (64, 1)
    assert found["rdma-retransmitted-packets"] == 3


def test_a_host_without_rdma_has_no_samples_and_one_reason(tmp_path: Path) -> None:
    with pytest.raises(SourceAbsentError, match="no RDMA device under"):
        RdmaSource(tmp_path / "infiniband").read(0)
