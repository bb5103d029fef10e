from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.host.nic import (
    NicSource,
    congestion_counters,
    device_statistics,
    parse_statistics,
)
from rankscope.collector.host.sample import SourceAbsentError

if TYPE_CHECKING:
    from pathlib import Path


def interface(
    root: Path, name: str, *, is_physical: bool = True, operstate: str = "up", speed: str = "400000"
) -> Path:
    folder = root / name
    (folder / "statistics").mkdir(parents=True)
    if is_physical:
        (folder / "device").mkdir()
    for file, text in (("operstate", operstate), ("speed", speed), ("type", "1")):
        (folder / file).write_text(f"{text}\n")
    counters = {"tx_bytes": 10, "rx_bytes": 20, "rx_errors": 0, "tx_errors": 0, "rx_dropped": 4}
    for file, value in counters.items():
        (folder / "statistics" / file).write_text(f"{value}\n")
    (folder / "carrier_down_count").write_text("3\n")
    return folder


def read(source: NicSource) -> dict[str, float]:
    return {sample.name: sample.value for sample in source.read(5)}


def test_traffic_state_and_speed_of_an_interface(tmp_path: Path) -> None:
    folder = interface(tmp_path, "ens1")
    source = NicSource(tmp_path, statistics_of=lambda _name: {})
    source.read(0)

    (folder / "statistics" / "tx_bytes").write_text("1010\n")
    (folder / "operstate").write_text("down\n")
    (folder / "carrier_down_count").write_text("5\n")
    found = read(source)

    assert found["nic-sent-bytes:ens1"] == 1000
    assert found["nic-received-bytes"] == 0
    assert found["nic-link-down-events"] == 2
    assert found["nic-link-is-up:ens1"] == 0
    assert found["nic-speed-bytes-per-s:ens1"] == 50e9


def test_unknown_state_and_speed_are_left_out(tmp_path: Path) -> None:
    interface(tmp_path, "ens1", operstate="unknown", speed="-1")

    found = read(NicSource(tmp_path, statistics_of=lambda _name: {}))

    assert not [name for name in found if name.startswith(("nic-link-is-up", "nic-speed"))]


def test_virtual_interfaces_count_only_without_physical_ones(tmp_path: Path) -> None:
    interface(tmp_path, "veth0", is_physical=False)
    interface(tmp_path, "ifb0", is_physical=False, operstate="down")
    assert "nic-sent-bytes:veth0" in read(NicSource(tmp_path, statistics_of=lambda _name: {}))
    assert "nic-sent-bytes:ifb0" not in read(NicSource(tmp_path, statistics_of=lambda _name: {}))

    interface(tmp_path, "ens1")
    found = read(NicSource(tmp_path, statistics_of=lambda _name: {}))

    assert "nic-sent-bytes:ens1" in found
    assert "nic-sent-bytes:veth0" not in found


def test_pause_frames_of_all_priorities_are_summed(tmp_path: Path) -> None:
    interface(tmp_path, "ens1")
    statistics = {"rx_prio0_pause": 5, "rx_prio3_pause": 7, "rx_prio3_pause_duration": 900}
    source = NicSource(tmp_path, statistics_of=lambda _name: statistics)
    source.read(0)

    statistics["rx_prio3_pause"] = 107

    assert read(source)["nic-pause-received-frames"] == 100


def test_mlx5_statistics_get_our_names() -> None:
    statistics = {
        "tx_prio3_pause": 4,
        "rx_ecn_mark": 6,
        "rx_discards_phy": 8,
        "rx_symbol_err_phy": 9,
        "rx0_packets": 1,
        "tx_prio3_pause_transition": 2,
    }

    assert list(congestion_counters(statistics)) == [
        ("nic-pause-sent-frames", "tx_prio3_pause", 4),
        ("nic-ecn-marked-packets", "rx_ecn_mark", 6),
        ("nic-discarded-packets", "rx_discards_phy", 8),
        ("nic-symbol-errors", "rx_symbol_err_phy", 9),
    ]


def test_the_drivers_arrays_are_paired_up_to_the_shorter() -> None:
    strings = b"rx_ecn_mark".ljust(32, b"\0") + b"tx_prio0_pause".ljust(32, b"\0")
    assert parse_statistics(strings, struct.pack("=QQ", 1, 2**40)) == {
        "rx_ecn_mark": 1,
        "tx_prio0_pause": 2**40,
    }
    assert parse_statistics(strings, struct.pack("=Q", 1)) == {"rx_ecn_mark": 1}


@pytest.mark.parametrize("name", ["lo", "no-such-nic", "a-name-longer-than-an-interface-may-have"])
def test_an_interface_without_driver_statistics_has_none(name: str) -> None:
    assert device_statistics(name) == {}


def test_a_host_without_interfaces_has_no_samples(tmp_path: Path) -> None:
    with pytest.raises(SourceAbsentError, match="no network interface under"):
        NicSource(tmp_path).read(0)
