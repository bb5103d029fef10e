"""Checks of RDMA ports, Ethernet interfaces and NCCL, on recorded files and outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.doctor.checks.ethernet import parse_ethtool
from rankscope.doctor.checks.nccl import parse_log
from rankscope.doctor.checks.rdma import parse_ibstat
from rankscope.doctor.result import State
from tests.support.rankscope.recorded_host import RecordedHost, gpu_report

if TYPE_CHECKING:
    from pathlib import Path

IBSTAT = """\
CA 'mlx5_0'
        CA type: MT4129
        Number of ports: 1
        Firmware version: 28.39.1002
        Hardware version: 0
        Node GUID: 0x58a2e10300dae626
        System image GUID: 0x58a2e10300dae626
        Port 1:
                State: Active
                Physical state: LinkUp
                Rate: 200
                Base lid: 0
                LMC: 0
                SM lid: 0
                Capability mask: 0x00010000
                Port GUID: 0x5aa2e1fffedae626
                Link layer: Ethernet
CA 'mlx5_1'
        CA type: MT4129
        Number of ports: 1
        Firmware version: 28.39.1002
        Hardware version: 0
        Node GUID: 0x58a2e10300dae627
        System image GUID: 0x58a2e10300dae626
        Port 1:
                State: Active
                Physical state: LinkUp
                Rate: 100
                Base lid: 0
                LMC: 0
                SM lid: 0
                Capability mask: 0x00010000
                Port GUID: 0x5aa2e1fffedae627
                Link layer: Ethernet
CA 'mlx5_10'
        CA type: MT4125
        Number of ports: 1
        Firmware version: 22.31.1014
        Hardware version: 0
        Node GUID: 0xb83fd203002d6502
        Port 1:
                State: Down
                Physical state: Disabled
                Rate: 40
                Link layer: Ethernet
ibpanic: [1323906] main: stat of IB device 'mlx5_8' failed: No such file or directory
"""
"""Sources: kvcache-ai/Mooncake issue 1999 (the rate of mlx5_1 is changed), leptonai/gpud pull
request 752 (the last line)."""

ETHTOOL = """\
Settings for eth0:
        Supported ports: [ TP ]
        Supported link modes:   10baseT/Half 10baseT/Full
                                100baseT/Half 100baseT/Full
                                1000baseT/Full
        Supported pause frame use: No
        Supports auto-negotiation: Yes
        Advertised link modes:  10baseT/Half 10baseT/Full
                                100baseT/Half 100baseT/Full
                                1000baseT/Full
        Speed: 100Mb/s
        Duplex: Full
        Link detected: yes
"""
"""Source: SoftRoCE/rxe-dev issue 52; the speed is changed."""

RDMA_LOG = """\
n1:179:179 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
n1:179:179 [0] NCCL INFO Using network IB
n1:179:179 [0] NCCL INFO NCCL_IB_HCA set to mlx5_0,mlx5_1
n1:179:190 [0] NCCL INFO NCCL_IB_TIMEOUT set by environment to 14.
n1:179:179 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
n1:179:190 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
n1:179:190 [0] NCCL INFO Channel 01/0 : 8[0] -> 0[0] [receive] via NET/IB/1/GDRDMA
n1:180:191 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/direct pointer/read
"""
"""Source of its form: siderolabs/docs issue 566, NVIDIA/nccl issue 1412."""

SOCKET_LOG = """\
ip-172-31-0-11:45384:45384 [0] NCCL INFO NET/IB : No device found.
NCCL version 2.4.7+cuda9.2
ip-172-31-0-11:45384:45384 [0] NCCL INFO NET/Socket : Using [0]ens3:172.31.0.11<0>
ip-172-31-0-11:45384:45384 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).
ip-172-31-0-11:45384:45399 [7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3
"""
"""Sources: NVIDIA/nccl issues 226 and 952."""

LOOPBACK_LOG = """\
axa:3048391:3048566 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
axa:3048391:3048566 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to lo
axa:3048391:3048566 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>
axa:3048391:3048566 [0] NCCL INFO Using network Socket
"""
"""Source: NVIDIA/nccl issue 1053."""

OLD_RDMA_LOG = """\
master_node:20:289 [0] NCCL INFO NET/Socket : Using [0]ib0:192.168.11.1<0>
master_node:20:289 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).
master_node:20:289 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:192.168.11.1<0>
NCCL version 2.4.7+cuda10.0
master_node:20:289 [0] NCCL INFO Channel 00 : 3[1af00] -> 4[15e00] [send] via NET/IB/0
"""
"""Source: Mellanox/nv_peer_memory issue 56; the channel's form is that of NVIDIA/nccl issue 707."""

FAILED_LOG = RDMA_LOG + (
    "n1:179:190 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<55921> with status=12"
    " opcode=1 len=0 vendor err 129 (Send)\n"
)
"""Source: NVIDIA/nccl issue 1814."""


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedHost:
    return RecordedHost(tmp_path)


def add_ports(recorded: RecordedHost, num: int = 4, **files: str) -> None:
    for number in range(num):
        recorded.port(f"mlx5_{number}", **files)


def test_without_a_port_nothing_is_healthy(recorded: RecordedHost) -> None:
    found = [result for result in recorded.results() if result.section in {"RDMA", "Ethernet"}]

    assert {result.state for result in found} == {State.NOT_APPLICABLE}


def test_four_equal_ports_deviate_in_nothing(recorded: RecordedHost) -> None:
    add_ports(recorded, counters__symbol_error="0", counters__link_downed="1")

    found = [result for result in recorded.results() if result.section == "RDMA"]

    assert [result for result in found if result.is_deviation] == []
    assert recorded.lines("rdma-state", "rdma-rate", "rdma-errors") == [
        "healthy: 4 ports active",
        "healthy: 4 x 400 Gb/s",
        "healthy: 4 ports without errors",
    ]


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({"state": "1: DOWN", "phys_state": "2: Polling"},
         "error mlx5_9/1: the port is DOWN, its link Polling"),
        ({"state": "2: INIT"}, "error mlx5_9/1: the port is INIT, its link LinkUp"),
        ({"state": "1: DOWN", "phys_state": "3: Disabled"},
         "warning mlx5_9/1: the port is DOWN, its link Disabled"),
        ({"rate": "100 Gb/sec (1X NDR)"}, "error mlx5_9/1: the link runs at 100 Gb/s on one lane"),
        ({"rate": "200 Gb/sec (4X HDR)"},
         "error mlx5_9/1: the link runs at 200 Gb/s, and its like at 400 Gb/s"),
        ({"counters__symbol_error": "12"}, "warning mlx5_9/1: counted: symbol_error 12"),
        ({"counters__link_downed": "9"}, "warning mlx5_9/1: counted: link_downed 9"),
    ],
)  # fmt: skip
def test_one_bad_port_is_named(recorded: RecordedHost, files: dict[str, str], line: str) -> None:
    add_ports(recorded, counters__symbol_error="0", counters__link_downed="1")
    recorded.port("mlx5_9", **{"counters__symbol_error": "0", "counters__link_downed": "1"} | files)

    found = [result for result in recorded.results() if result.section == "RDMA"]
    (result,) = (result for result in found if result.is_deviation)
    assert f"{result.state} {result.part}: {result.reason}" == line


def test_a_port_that_nccl_does_not_use_is_not_judged(recorded: RecordedHost) -> None:
    add_ports(recorded)
    recorded.port("mlx5_9", state="1: DOWN", phys_state="2: Polling")

    for setting in ("mlx5_0,mlx5_1", "^mlx5_9", "=mlx5_0:1"):
        (line,) = recorded.lines("rdma-state", environment={"NCCL_IB_HCA": setting})
        assert line.startswith("healthy")


def test_an_ethernet_port_beside_infiniband_is_not_judged(recorded: RecordedHost) -> None:
    # imbue-ai/cluster-health issue 4: the second Ethernet port of a card is down on a healthy host.
    add_ports(recorded)
    recorded.port("mlx5_9", state="1: DOWN", phys_state="2: Polling", link_layer="Ethernet")

    assert recorded.lines("rdma-state") == ["healthy: 4 ports active"]


def test_ibstat_is_read_without_sysfs(recorded: RecordedHost) -> None:
    recorded.output("ibstat", IBSTAT)

    assert [port.name for port in parse_ibstat(IBSTAT)] == ["mlx5_0/1", "mlx5_1/1", "mlx5_10/1"]
    assert recorded.lines("rdma-state", "rdma-rate") == [
        (
            "warning: ibstat: ibpanic: [1323906] main: stat of IB device 'mlx5_8' failed: No such"
            " file or directory"
        ),
        "warning mlx5_10/1: the port is DOWN, its link Disabled",
        "error mlx5_1/1: the link runs at 100 Gb/s, and its like at 200 Gb/s",
    ]
    assert recorded.results("nic-firmware")[0].value == "MT4125 22.31.1014, MT4129 28.39.1002"


def test_a_roce_port_needs_an_address_of_version_2(recorded: RecordedHost) -> None:
    address = "0000:0000:0000:0000:0000:ffff:0a00:0001"
    gids = {
        "gids__1": address, "gid_attrs__types__1": "IB/RoCE v1",
        "gids__3": address, "gid_attrs__types__3": "RoCE v2",
    }  # fmt: skip
    recorded.port("mlx5_0", link_layer="Ethernet", **gids)

    assert recorded.lines("rdma-gid") == ["healthy: 1 port with an address of RoCE v2"]
    assert recorded.lines("rdma-gid", environment={"NCCL_IB_GID_INDEX": "1"}) == [
        "error mlx5_0/1: NCCL_IB_GID_INDEX=1 is no address of RoCE v2"
    ]


def test_an_adapter_with_fewer_lanes_is_an_error(recorded: RecordedHost) -> None:
    links = {
        "device__device__current_link_width": "8", "device__device__max_link_width": "16",
        "device__device__current_link_speed": "32.0 GT/s PCIe",
        "device__device__max_link_speed": "32.0 GT/s PCIe",
    }  # fmt: skip
    recorded.port("mlx5_0", **links)
    assert recorded.lines("rdma-pcie") == ["warning mlx5_0: the PCIe link has 8 of 16 lanes"]

    recorded.port("mlx5_1", **links | {"device__device__current_link_width": "16"})
    assert recorded.lines("rdma-pcie") == ["error mlx5_0: the PCIe link has 8 of 16 lanes"]


def test_gpudirect_needs_a_module_or_dmabuf(recorded: RecordedHost) -> None:
    recorded.output("nvidia-smi -q -x", gpu_report(2))
    recorded.port("mlx5_0")
    recorded.write("/proc/sys/kernel/osrelease", "5.15.0-105-generic\n")

    assert recorded.results("gpudirect")[0].state is State.WARNING
    recorded.write("/proc/modules", "nvidia_peermem 16384 0 - Live 0x0\nnvidia 1 0 - Live 0x0\n")
    assert recorded.lines("gpudirect") == ["healthy: module nvidia_peermem is loaded"]
    recorded.write("/proc/modules", "nvidia 1 0 - Live 0x0\n")
    recorded.write(
        "/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n",
    )
    assert recorded.results("gpudirect")[0].state is State.HEALTHY


def test_memlock_must_be_unlimited_with_rdma(recorded: RecordedHost) -> None:
    recorded.write(
        "/proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max open files            1024                 1048576              files\n"
        "Max locked memory         8388608              8388608              bytes\n",
    )

    assert [line.partition(":")[0] for line in recorded.lines("limits")] == ["warning nofile"]
    recorded.port("mlx5_0")
    assert [line.partition(":")[0] for line in recorded.lines("limits")] == [
        "warning nofile", "error memlock",
    ]  # fmt: skip


def test_an_interface_below_its_card_is_found(recorded: RecordedHost) -> None:
    files = {
        "type": "1", "flags": "0x1003", "speed": "100", "carrier": "1",
        "statistics/rx_crc_errors": "4", "device/vendor": "0x15b3",
    }  # fmt: skip
    for name, text in files.items():
        recorded.write(f"/sys/class/net/eth0/{name}", text)
    recorded.output("ethtool eth0", ETHTOOL)

    assert parse_ethtool(ETHTOOL).supported_mb_per_s == 1000
    assert recorded.lines("ethernet-link", "ethernet-errors") == [
        "warning eth0: the link runs at 100 Mb/s, and could at 1,000",
        "warning eth0: counted: rx_crc_errors 4",
    ]


def test_the_log_of_a_good_job_names_its_adapters(recorded: RecordedHost) -> None:
    add_ports(recorded, 2)

    assert recorded.lines("nccl-transport", nccl_log=RDMA_LOG) == [
        "healthy: IB over mlx5_0:1, mlx5_1:1; within the host P2P; GPUDirect RDMA"
    ]
    assert recorded.results("nccl", nccl_log=RDMA_LOG)[0].value == "2.28.9+cuda13.0"


def test_sockets_are_an_error_if_there_are_rdma_ports(recorded: RecordedHost) -> None:
    (line,) = recorded.lines("nccl-transport", nccl_log=SOCKET_LOG)
    assert line == "warning: NCCL uses TCP sockets on ens3 to other hosts"

    add_ports(recorded)
    (line,) = recorded.lines("nccl-transport", nccl_log=SOCKET_LOG)
    assert line == "error: NCCL uses TCP sockets on ens3, though 4 RDMA ports are active"


def test_a_log_on_the_loopback_is_an_error(recorded: RecordedHost) -> None:
    (line,) = recorded.lines("nccl-transport", nccl_log=LOOPBACK_LOG)

    assert line == "error: NCCL uses the interface lo, which leads to no other host"
    assert parse_log(LOOPBACK_LOG).settings["NCCL_SOCKET_IFNAME"] == "lo"


def test_copies_through_the_host_and_unused_ports_are_found(recorded: RecordedHost) -> None:
    add_ports(recorded, 2)

    assert recorded.lines("nccl-transport", nccl_log=OLD_RDMA_LOG) == [
        "warning: 1 of 1 channel to other hosts without GPUDirect RDMA",
        "warning: NCCL uses mlx5_0:1, and not mlx5_1/1",
    ]


def test_a_plugin_with_gpudirect_is_healthy(recorded: RecordedHost) -> None:
    # The form of aws-ofi-nccl, whose network has a space in its name.
    log = (
        "ip:1:2 [0] NCCL INFO Using network AWS Libfabric\n"
        "ip:1:3 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA\n"
    )

    assert recorded.lines("nccl-transport", nccl_log=log) == [
        "healthy: AWS Libfabric over unknown adapters; GPUDirect RDMA"
    ]


def test_joined_adapters_count_as_both(recorded: RecordedHost) -> None:
    add_ports(recorded, 2)
    log = RDMA_LOG.replace("[0]mlx5_0:1/IB [1]mlx5_1:1/IB", "[0]mlx5_0+mlx5_1:1/IB")

    assert recorded.lines("nccl-transport", nccl_log=log)[0].startswith("healthy: IB over mlx5_0+")


def test_a_failed_completion_is_an_error(recorded: RecordedHost) -> None:
    lines = recorded.lines("nccl-transport", nccl_log=FAILED_LOG)

    assert [line.startswith("error: NCCL: NET/IB : Got completion") for line in lines] == [True]


def test_a_text_without_a_line_of_nccl_says_so(recorded: RecordedHost) -> None:
    (result,) = recorded.results("nccl-transport", nccl_log="step 1 loss 2.0\n")

    assert result.state is State.NOT_APPLICABLE
    assert "NCCL_DEBUG=INFO" in result.reason


@pytest.mark.parametrize(
    ("settings", "state", "seconds"),
    [
        ({"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7"}, State.HEALTHY, "120 s"),
        ({"NCCL_IB_TIMEOUT": "20"}, State.HEALTHY, "30.1 s"),
        ({"NCCL_IB_TIMEOUT": "18"}, State.WARNING, "7.52 s"),
        ({"NCCL_IB_TIMEOUT": "14"}, State.WARNING, "0.47 s"),
        ({"NCCL_IB_TIMEOUT": "25"}, State.WARNING, "962 s"),
        ({"NCCL_IB_TIMEOUT": "100"}, State.WARNING, "adapters know 1 to 31"),
        ({"NCCL_IB_RETRY_CNT": "20", "NCCL_IB_TIMEOUT": "22"}, State.WARNING, "adapters know"),
        ({}, State.NOT_APPLICABLE, "version of NCCL is unknown"),
    ],
)  # fmt: skip
def test_the_timeout_is_that_of_the_formula(
    recorded: RecordedHost, settings: dict[str, str], state: State, seconds: str
) -> None:
    recorded.port("mlx5_0")

    (result,) = recorded.results("nccl-timeout", environment=settings)

    assert result.state is state
    assert seconds in result.reason


def test_defaults_follow_the_version_and_the_log_wins(recorded: RecordedHost) -> None:
    recorded.port("mlx5_0")
    recorded.write("/etc/nccl.conf", "# set by the site\nNCCL_IB_TIMEOUT=22\n")
    assert "NCCL_IB_TIMEOUT=22" in recorded.lines("nccl-timeout")[0]

    (line,) = recorded.lines("nccl-timeout", nccl_log=RDMA_LOG)
    assert line.startswith("warning: NCCL_IB_TIMEOUT=14, NCCL_IB_RETRY_CNT=7:")


def test_settings_that_slow_or_mislead_are_found(recorded: RecordedHost) -> None:
    recorded.port("mlx5_0")
    recorded.write("/sys/class/net/eth0/type", "1")
    environment = {
        "NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx4",
        "NCCL_SOCKET_IFNAME": "ib0",
    }  # fmt: skip

    assert recorded.lines("nccl-settings", environment=environment) == [
        "warning: NCCL_P2P_DISABLE=1: GPUs of this host do not use NVLink",
        "error: NCCL_IB_DISABLE=1: TCP is used, and 1 RDMA port are idle",
        "error: NCCL_IB_HCA=mlx4 names no port of this host",
        "error: NCCL_SOCKET_IFNAME=ib0 names no interface of this host",
    ]
