"""Outputs of real hosts, good and bad: each check says what they show, and nothing more."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rankscope.doctor.checks.dcgm import parse_diagnostic
from rankscope.doctor.checks.nvidia_smi import parse_links, parse_text_report
from rankscope.doctor.checks.rdma import parse_ibstatus, parse_rdma_link
from rankscope.doctor.result import State
from tests.support.rankscope.recorded_host import RecordedHost, gpu_report

if TYPE_CHECKING:
    from pathlib import Path

TEXT_REPORT = """\

==============NVSMI LOG==============

Timestamp                                 : Thu Mar 14 20:46:07 2024
Driver Version                            : 535.129.03
CUDA Version                              : 12.2

Attached GPUs                             : 2
GPU 00000000:2F:00.0
    Product Name                          : NVIDIA A100-SXM4-40GB
    Persistence Mode                      : Disabled
    MIG Mode
        Current                           : Disabled
        Pending                           : Disabled
    GPU UUID                              : GPU-20af7308-7522-d66f-fe01-fb6f0551a4b8
    GPU Reset Status
        Reset Required                    : No
        Drain and Reset Recommended       : No
    PCI
        Bus                               : 0x2F
        Bus Id                            : 00000000:2F:00.0
        GPU Link Info
            PCIe Generation
                Max                       : 4
                Current                   : 4
                Device Current            : 4
                Host Max                  : 3
            Link Width
                Max                       : 16x
                Current                   : 16x
        Replays Since Reset               : 0
    Fan Speed                             : N/A
    Clocks Event Reasons
        Idle                              : Active
        SW Power Cap                      : Not Active
        HW Slowdown                       : Not Active
            HW Thermal Slowdown           : Not Active
            HW Power Brake Slowdown       : Not Active
        SW Thermal Slowdown               : Not Active
    Compute Mode                          : Default
    Utilization
        Gpu                               : 0 %
    ECC Mode
        Current                           : Enabled
        Pending                           : Enabled
    ECC Errors
        Volatile
            SRAM Correctable              : 0
            SRAM Uncorrectable            : 0
            DRAM Correctable              : 0
            DRAM Uncorrectable            : 0
        Aggregate
            SRAM Correctable              : 0
            SRAM Uncorrectable            : 0
            DRAM Correctable              : 0
            DRAM Uncorrectable            : 0
    Retired Pages
        Single Bit ECC                    : N/A
        Double Bit ECC                    : N/A
        Pending Page Blacklist            : N/A
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 0
        Pending                           : No
        Remapping Failure Occurred        : No
        Bank Remap Availability Histogram
            Max                           : 640 bank(s)
            None                          : 0 bank(s)
    GPU Power Readings
        Power Draw                        : 53.16 W
        Current Power Limit               : 400.00 W
        Default Power Limit               : 400.00 W
    Clocks
        Graphics                          : 210 MHz
        SM                                : 210 MHz
    Applications Clocks
        Graphics                          : 1095 MHz
    Default Applications Clocks
        Graphics                          : 1095 MHz
    Max Clocks
        SM                                : 1410 MHz
    Fabric
        State                             : N/A
        Status                            : N/A
    Processes
        GPU instance ID                   : N/A
        Process ID                        : 2573
            Type                          : C
            Name                          : python

GPU 00000000:35:00.0
    Product Name                          : NVIDIA A100-SXM4-40GB
    Persistence Mode                      : Enabled
    MIG Mode
        Current                           : Disabled
    GPU UUID                              : GPU-20af7308-7522-d66f-fe01-fb6f0551a4b9
    PCI
        GPU Link Info
            PCIe Generation
                Max                       : 4
                Current                   : 4
            Link Width
                Max                       : 16x
                Current                   : 8x
    Clocks Event Reasons
        HW Slowdown                       : Active
            HW Thermal Slowdown           : Not Active
            HW Power Brake Slowdown       : Active
        SW Thermal Slowdown               : Not Active
    ECC Mode
        Current                           : Enabled
    ECC Errors
        Volatile
            DRAM Correctable              : 177
            DRAM Uncorrectable            : 0
    Remapped Rows
        Correctable Error                 : 1
        Pending                           : Yes
        Remapping Failure Occurred        : No
    Applications Clocks
        Graphics                          : 900 MHz
    Default Applications Clocks
        Graphics                          : 1095 MHz
    Clocks
        SM                                : 705 MHz
    Max Clocks
        SM                                : 1410 MHz
    Processes                             : None
"""
"""The form of `nvidia-smi -q` of driver 535 on eight A100 of SXM4, shortened; the second GPU is
changed."""

RETIRED = """\
==============NVSMI LOG==============

Driver Version                            : 535.86.10
CUDA Version                              : 12.2

Attached GPUs                             : 2
GPU 00000001:00:00.0
    Retired Pages
        Single Bit ECC                    : 60
        Double Bit ECC                    : 5
        Pending Page Blacklist            : No

GPU 00000002:00:00.0
    Retired Pages
        Single Bit ECC                    : 2
        Double Bit ECC                    : 61
        Pending Page Blacklist            : Yes
"""
"""Source: Azure/azurehpc-health-checks, ``test/data/bad_nvsmi8_output.txt``, the first two GPUs."""

BLACKWELL_LINKS = """\
GPU 0: NVIDIA GB200 (UUID: GPU-d1b93026-6d5b-03bd-3a71-f85b47a61bde)
\t Link 0: 53.125 GB/s
\t Link 1: 53.125 GB/s
GPU 1: NVIDIA GB200 (UUID: GPU-39ac7bce-e3d6-b426-008e-fa47897c72d5)
\t Link 0: 53.125 GB/s
\t Link 1: <inactive>
"""
"""Source: NVIDIA/k8s-test-infra issue 371, shortened; the last link is changed."""

BLACKWELL_ERRORS = """\
GPU 0: NVIDIA GB200 (UUID: GPU-d1b93026-6d5b-03bd-3a71-f85b47a61bde)
\t Link 0: Tx packets: 1234567
\t Link 0: Malformed packet Errors: 0
\t Link 0: Tx discards: 0
\t Link 0: Link recovery successful events: 4
\t Link 0: Link recovery failed events: 2
\t Link 0: Effective Errors: 7
\t Link 0: Effective BER: 15e-255
\t Link 0: FEC Errors - 0: 98765432109
\t Link 0: FEC Errors - 1: 12
"""
"""The counters that nvidia-smi(1) names for a port of NVLink 5."""

IBSTATUS = """\
Infiniband device 'mlx5_0' port 1 status:
        default gid:     fe80:0000:0000:0000:8ae9:a4ff:fe9c:7f1a
        base lid:        0x0
        sm lid:          0x0
        state:           4: ACTIVE
        phys state:      5: LinkUp
        rate:            100 Gb/sec (4X EDR)
        link_layer:      Ethernet

Infiniband device 'mlx5_1' port 1 status:
        default gid:     fe80:0000:0000:0000:8ae9:a4ff:fe9c:7f1b
        base lid:        0x0
        sm lid:          0x0
        state:           1: DOWN
        phys state:      3: Disabled
        rate:            40 Gb/sec (4X QDR)
        link_layer:      Ethernet
"""
"""Source: NVIDIA/nccl issue 1866; the second port is changed."""

RDMA_LINK = """\
link mlx5_0/1 subnet_prefix fe80:0000:0000:0000 lid 13 sm_lid 49 lmc 0 state ACTIVE physical_state LINK_UP
link mlx5_1/1 subnet_prefix fe80:0000:0000:0000 lid 65535 sm_lid 0 lmc 0 state DOWN physical_state POLLING
link mlx5_2/1 state ACTIVE physical_state LINK_UP netdev ens1f0np0
"""  # noqa: E501  # as the tool prints it
"""The form of rdma-link(8)."""

VIRTUAL_FUNCTION = """\
CA 'mlx5_7'
        CA type: MT4124
        Number of ports: 1
        Firmware version: 20.28.4000
        Hardware version: 0
        Node GUID: 0x9aecdde4e1e642ba
        System image GUID: 0x043f720300df3e00
        Port 1:
                State: Down
                Physical state: LinkUp
                Rate: 200
                Base lid: 65535
                LMC: 0
                SM lid: 1
                Capability mask: 0x2651ec48
                Port GUID: 0x9aecdde4e1e642ba
                Link layer: InfiniBand
"""
"""Source: Mellanox/network-operator issue 249."""

MLX5_STATISTICS = """\
NIC statistics:
     rx_packets: 4829918
     rx_bytes: 482991823104
     rx_out_of_buffer: 0
     rx_packets_phy: 4829918
     rx_crc_errors_phy: 0
     rx_symbol_err_phy: 31
     rx_discards_phy: 26
     rx_corrected_bits_phy: 91823771
     rx0_packets: 12
"""
"""Names: Linux, ``drivers/net/ethernet/mellanox/mlx5/core/en_stats.c``."""

ENA_STATISTICS = """\
NIC statistics:
     total_resets: 0
     tx_timeout: 0
     bw_in_allowance_exceeded: 0
     bw_out_allowance_exceeded: 35714
     pps_allowance_exceeded: 0
     conntrack_allowance_exceeded: 0
     linklocal_allowance_exceeded: 0
     queue_0_rx_cnt: 1000
"""
"""Names: Amazon EC2, "Monitor network performance for ENA settings on your EC2 instance"."""

BNXT_STATISTICS = """\
NIC statistics:
     [0]: rx_ucast_packets: 123
     [0]: rx_discards: 5
     rx_ucast_frames: 1000000
     rx_fcs_err_frames: 0
     rx_stat_discard: 3
     continuous_pause_events: 0
"""
"""Names: Linux, ``drivers/net/ethernet/broadcom/bnxt/bnxt_ethtool.c``."""

DF = """\
Filesystem                         Size  Used Avail Use% Mounted on
tmpfs                              202G  5.3M  202G   1% /run
/dev/mapper/ubuntu--vg-ubuntu--lv  1.8T  1.8T     0 100% /
tmpfs                             1008G     0 1008G   0% /dev/shm
/dev/nvme1n1                        14T  7.1T  6.9T  51% /data
nfs:/home                          100T   99T  1.0T  99% /home
"""
"""The form of df(1) with ``-h``."""

ULIMIT = """\
core file size              (blocks, -c) 0
max locked memory           (kbytes, -l) 65536
open files                          (-n) 1024
max user processes                  (-u) unlimited
"""
"""The form of bash(1), ``ulimit -a``."""

TIMEDATECTL = """\
               Local time: Thu 2024-03-14 20:46:07 UTC
           Universal time: Thu 2024-03-14 20:46:07 UTC
                 RTC time: Thu 2024-03-14 20:46:07
                Time zone: Etc/UTC (UTC, +0000)
System clock synchronized: no
              NTP service: inactive
          RTC in local TZ: no
"""
"""The form of timedatectl(1)."""

DIAGNOSTIC_3 = json.dumps(
    {
        "DCGM GPU Diagnostic": {
            "version": "3.1.8",
            "test_categories": [
                {
                    "category": "Deployment",
                    "tests": [
                        {"name": "Denylist", "results": [{"gpu_ids": "0,1", "status": "PASS"}]},
                        None,
                        {
                            "name": "Persistence Mode",
                            "results": [
                                {
                                    "gpu_ids": "1",
                                    "status": "FAIL",
                                    "warnings": ["Persistence mode for GPU 1 is disabled."],
                                }
                            ],
                        },
                    ],
                },
                {
                    "category": "Integration",
                    "tests": [{"name": "PCIe", "results": [{"gpu_id": "0", "status": "Skip"}]}],
                },
            ],
        }
    }
)
"""The form of NVIDIA/DCGM issue 139 and its tests, with null between tests."""

DIAGNOSTIC_4 = json.dumps(
    {
        "DCGM Diagnostic": {
            "test_categories": [
                {
                    "category": "Deployment",
                    "tests": [
                        {
                            "name": "software",
                            "results": [
                                {"entity_group": "GPU", "entity_id": 0, "status": "Pass"},
                                {
                                    "entity_group": "GPU",
                                    "entity_id": 1,
                                    "status": "Fail",
                                    "warnings": [
                                        {"error_id": 95, "warning": "GPU 1 has a pending row remap"}
                                    ],
                                },
                            ],
                            "test_summary": {"status": "Fail"},
                        }
                    ],
                }
            ]
        }
    }
)
"""The form of DCGM 4. Source: facebookresearch/gcm pull request 38."""

DIAGNOSTIC_TABLE = """\
Successfully ran diagnostic for group.
+---------------------------+------------------------------------------------+
| Diagnostic                | Result                                         |
+===========================+================================================+
|-----  Deployment  --------+------------------------------------------------|
| Denylist                  | Pass                                           |
| Page Retirement/Row Remap | Fail - GPU: 3                                  |
| Warning                   | GPU 3 had uncorrectable memory errors          |
| Graphics Processes        | Pass                                           |
+-----  Integration  -------+------------------------------------------------+
| PCIe                      | Skip - All                                     |
"""
"""Source of its form: NVIDIA/DCGM issue 55."""

DMESG = """\
[    0.000000] Linux version 5.15.0-105-generic
[  100.100000] NVRM: Xid (PCI:0000:3b:00): 48, pid=4711, name=python, DBE (double bit error)
[90000.200000] NVRM: Xid (PCI:0000:5d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[90100.300000] mlx5_core 0000:12:00.0 ens1f0np0: Link down
[90200.400000] NVRM: Xid (PCI:0000:5d:00): 45, pid=4711, name=python, Ch 00000008
"""  # noqa: E501
"""Forms: tests/collector/host/test_kernel_messages.py."""


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedHost:
    return RecordedHost(tmp_path)


def gpu_lines(recorded: RecordedHost) -> list[str]:
    """Return the deviations of the GPUs."""
    return [
        f"{result.state} {result.check} {result.part}: {result.reason}"
        for result in recorded.results()
        if result.section == "GPUs" and result.is_deviation
    ]


def test_the_text_report_is_read_as_the_xml_one(recorded: RecordedHost) -> None:
    recorded.output("nvidia-smi -q", TEXT_REPORT)

    report = parse_text_report(TEXT_REPORT)
    assert report is not None
    assert (report.driver, report.cuda, report.num_attached) == ("535.129.03", "12.2", 2)
    assert gpu_lines(recorded) == [
        "warning gpu-ecc GPU 1: 177 corrected memory errors since the driver was loaded",
        "error gpu-row-remap GPU 1: a bad memory row waits to be remapped",
        (
            "error gpu-throttle GPU 1: power brake: the power supply asks for less (now 705 of"
            " 1,410 MHz)"
        ),
        "warning gpu-throttle GPU 1: the application clock is 900 MHz, and 1,095 MHz by default",
        "error gpu-pcie GPU 1: the PCIe link has 8 of 16 lanes",
        (
            "warning gpu-persistence GPU 0: persistence is off: each start of a job initialises the"
            " GPU anew"
        ),
    ]
    assert recorded.lines("gpu-processes", is_before_job=True) == [
        "error GPU 0: pid 2573 of an earlier job uses it"
    ]
    assert recorded.results("gpu-row-remap")[0].device == "20af7308-7522-d66f-fe01-fb6f0551a4b9"


def test_a_part_of_a_report_makes_nothing_healthy_that_it_does_not_show(
    recorded: RecordedHost,
) -> None:
    recorded.output("nvidia-smi -q", RETIRED)

    states = {r.check: r.state for r in recorded.results() if r.section == "GPUs"}
    assert states.pop("gpu-count") is State.HEALTHY
    assert states.pop("gpu-row-remap") is State.ERROR
    assert {*states.values()} == {State.NOT_APPLICABLE}


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ("<state>Completed</state><status>Success</status>",
         ("<state>Completed</state><status>Success</status><health><summary>Unhealthy</summary>"
         "<bandwidth>Full</bandwidth><route_unhealthy>False</route_unhealthy></health>"),
         ["error gpu-fabric GPU 1: the NVSwitch fabric reports summary: Unhealthy"]),
        ("<state>Completed</state><status>Success</status>",
         ("<state>Completed</state><status>Success</status><health><summary>Healthy</summary>"
         "<bandwidth>Full</bandwidth><partition_assigned>True</partition_assigned></health>"), []),
        ("<volatile>", "<volatile><x>", None),
        ("<clocks><sm_clock>",
         ("<clocks_event_reasons_counters><clocks_event_reasons_counters_hw_power_brake>5000000 us"
         "</clocks_event_reasons_counters_hw_power_brake></clocks_event_reasons_counters>"
         "<clocks><sm_clock>"),
         [("warning gpu-throttle GPU 1: slowed down by the power brake for 5.00 s since the driver"
          " was loaded")]),
        ("NVIDIA H100 80GB HBM3", "NVIDIA L40S",
         ["warning gpu-count : unlike GPUs: 3 x NVIDIA H100 80GB HBM3, 1 x NVIDIA L40S"]),
        ("<gpu_recovery_action>None", "<gpu_recovery_action>Drain and Reset",
         ["error gpu-count GPU 1: the driver asks for recovery: Drain and Reset"]),
        ("<sram_correctable>0", "<sram_correctable>[Unknown Error]",
         ["error gpu-count GPU 1: the driver answers: [Unknown Error]"]),
    ],
)  # fmt: skip
def test_one_change_of_a_report_is_one_deviation(
    recorded: RecordedHost, old: str, new: str, lines: list[str] | None
) -> None:
    recorded.output("nvidia-smi -q -x", gpu_report(4, changes={1: {old: new}}))

    if lines is None:  # a report that was cut off or is not well-formed
        assert gpu_lines(recorded)[0].startswith("warning gpu-count : nvidia-smi has no report")
    else:
        assert gpu_lines(recorded) == lines


def test_mig_reports_no_errors_of_the_whole_gpu_but_of_its_parts(recorded: RecordedHost) -> None:
    # NVIDIA/nvidia-docker issue 1473: the volatile numbers of a GPU with MIG are N/A.
    unknown = {
        f"<{name}>0<": f"<{name}>N/A<"
        for name in (
            "sram_correctable", "sram_uncorrectable_parity", "sram_uncorrectable_secded",
            "dram_correctable", "dram_uncorrectable",
        )
    } | {"current_mig>Disabled": "current_mig>Enabled"}  # fmt: skip
    recorded.output("nvidia-smi -q -x", gpu_report(1, changes={0: unknown}))
    assert recorded.results("gpu-ecc")[0].state is State.NOT_APPLICABLE

    devices = (
        "<mig_devices><mig_device><ecc_error_count><volatile_count><sram_uncorrectable>2"
        "</sram_uncorrectable></volatile_count></ecc_error_count></mig_device></mig_devices>"
    )
    changes = {0: unknown | {"<performance_state>": f"{devices}<performance_state>"}}
    recorded.output("nvidia-smi -q -x", gpu_report(1, changes=changes))
    assert recorded.lines("gpu-ecc") == [
        "error GPU 0: 2 uncorrectable memory errors since the driver was loaded"
    ]


@pytest.mark.parametrize(
    ("message", "state"),
    [
        # NVIDIA/nvidia-docker issue 1730: the cgroup of a container lost its devices.
        ("Failed to initialize NVML: Unknown Error", State.ERROR),
        ("Failed to initialize NVML: Insufficient Permissions", State.ERROR),
        ("No devices were found", State.ERROR),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
         State.ERROR),
        ("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.", State.ERROR),
        ("Segmentation fault", State.WARNING),
        ("", State.NOT_APPLICABLE),
    ],
)  # fmt: skip
def test_a_tool_without_a_report_is_never_healthy(
    recorded: RecordedHost, message: str, state: State
) -> None:
    recorded.output("nvidia-smi -q -x", message)

    (result,) = recorded.results("gpu-count")
    assert result.state is state
    assert result.remedy or state is State.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("name", "state"),
    [("NVIDIA H100 80GB HBM3", State.ERROR), ("NVIDIA GB200", State.ERROR),
     ("NVIDIA B200", State.ERROR), ("NVIDIA H20", State.ERROR), ("NVIDIA H200", State.ERROR),
     ("NVIDIA H100 PCIe", State.WARNING), ("NVIDIA A100-PCIE-40GB", State.WARNING),
     ("NVIDIA H200 NVL", State.WARNING), ("NVIDIA A100-SXM4-80GB", State.ERROR)],
)  # fmt: skip
def test_links_that_are_all_inactive_are_an_error_where_the_board_has_some(
    recorded: RecordedHost, name: str, state: State
) -> None:
    # Azure/azurehpc-health-checks, test/data/bad_nvlink_status.txt.
    text = "".join(
        f"GPU {gpu}: {name} (UUID: GPU-9667d95e-6d22-0c22-1f57-c481f13e7c4{gpu})\n"
        "NVML: Unable to retrieve NVLink information as all links are inactive\n"
        for gpu in range(2)
    )
    changes = {gpu: {"NVIDIA H100 80GB HBM3": name} for gpu in range(2)}
    recorded.output("nvidia-smi -q -x", gpu_report(2, changes=changes))
    recorded.output("nvidia-smi nvlink -s", text)

    (result,) = recorded.results("gpu-nvlink")
    assert (result.state, result.reason) == (state, "all NVLinks of 2 GPUs are inactive")


def test_links_of_blackwell_are_read(recorded: RecordedHost) -> None:
    recorded.output("nvidia-smi -q -x", gpu_report(2))
    recorded.output("nvidia-smi nvlink -s", BLACKWELL_LINKS)
    recorded.output("nvidia-smi nvlink -e", BLACKWELL_ERRORS)

    assert parse_links(BLACKWELL_LINKS)[1].inactive == [1]
    assert recorded.lines("gpu-nvlink") == [
        "warning GPU 0: NVLink counts 2 Link recovery failed events, 7 Effective Errors",
        "error GPU 1: 1 of 2 NVLink links are active (inactive: 1)",
    ]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (DIAGNOSTIC_3, ["error GPU 1: Persistence Mode: Persistence mode for GPU 1 is disabled."]),
        (DIAGNOSTIC_4, ["error GPU 1: software: GPU 1 has a pending row remap"]),
        (DIAGNOSTIC_TABLE,
         ["error GPU 3: Page Retirement/Row Remap: GPU 3 had uncorrectable memory errors"]),
        (DIAGNOSTIC_4.replace('"Fail"', '"Pass"'), ["healthy: 2 tests of DCGM passed"]),
        ('{"DCGM GPU Diagnostic": {"runtime_error": "No GPU"}}',
         ["warning: the diagnostic failed: No GPU"]),
        ("Error: unable to connect to the specified host: localhost",
         [("warning: the diagnostic failed: Error: unable to connect to the specified"
          " host: localhost")]),
        ('{"DCGM GPU Diagnostic": {"version": "4.2.3"}}',
         ["not applicable: the diagnostic of DCGM has no result"]),
        ("[]", ["not applicable: the diagnostic of DCGM has no result"]),
    ],
)  # fmt: skip
def test_the_diagnostic_of_dcgm_is_read(
    recorded: RecordedHost, text: str, lines: list[str]
) -> None:
    recorded.output("dcgmi diag -r 1 -j", text)

    assert recorded.lines("gpu-diagnostic") == lines


def test_a_skipped_test_is_no_passed_one() -> None:
    results, _ = parse_diagnostic(DIAGNOSTIC_3)

    assert [(one.name, one.gpus, one.status) for one in results] == [
        ("Denylist", "0,1", "pass"), ("Persistence Mode", "1", "fail"), ("PCIe", "0", "skip"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"body": {"Overall Health": {"value": "Healthy"}}}', "healthy: DCGM: healthy"),
        ("| Overall Health:           | Warning              |\n| -> 0 | Warning |\n",
         "warning: DCGM: Warning: Overall Health: Warning; -> 0 Warning"),
        ("Error: unable to connect", ("not applicable: dcgmi is not installed, or its watches are"
         " off (dcgmi health -s a)")),
    ],
)  # fmt: skip
def test_the_health_watches_of_dcgm_are_read(recorded: RecordedHost, text: str, line: str) -> None:
    recorded.output("dcgmi health -c", text)

    assert recorded.lines("gpu-dcgm") == [line]


def test_ports_are_read_of_the_tool_that_is_there(recorded: RecordedHost) -> None:
    recorded.output("rdma link", RDMA_LINK)
    assert [port.name for port in parse_rdma_link(RDMA_LINK)] == [
        "mlx5_0/1",
        "mlx5_1/1",
        "mlx5_2/1",
    ]
    assert recorded.lines("rdma-state") == ["error mlx5_1/1: the port is DOWN, its link Polling"]

    recorded.output("ibstatus", IBSTATUS)
    assert [port.layer for port in parse_ibstatus(IBSTATUS)] == ["Ethernet", "Ethernet"]
    assert recorded.lines("rdma-state", "rdma-rate") == [
        "warning mlx5_1/1: the port is DOWN, its link Disabled", "healthy: 1 x 100 Gb/s",
    ]  # fmt: skip

    recorded.output("ibstat", VIRTUAL_FUNCTION)
    (result,) = recorded.results("rdma-state")
    assert result.reason == "the port is DOWN, its link LinkUp"
    assert result.remedy.startswith("start the subnet manager")


def test_a_link_at_the_first_rate_of_infiniband_is_an_error(recorded: RecordedHost) -> None:
    # leptonai/gpud pull request 482: a link that has not trained shows 10 Gb/s.
    recorded.port("mlx5_0", rate="10 Gb/sec (4X SDR)")

    assert recorded.lines("rdma-rate") == [
        "error mlx5_0/1: the link runs at 10 Gb/s, the slowest rate of InfiniBand"
    ]


def test_an_efa_is_no_roce_port(recorded: RecordedHost) -> None:
    recorded.port(
        "rdmap16s27", link_layer="Unspecified", rate="100 Gb/sec (4X EDR)", gids__0="fe80::1",
        gid_attrs__types__0="IB/RoCE v1", hw_counters__retrans_timeout_events="0",
        hw_counters__rdma_write_wr_err="4", device__hca_type="0xefa2",
    )  # fmt: skip

    assert recorded.results("rdma-gid")[0].state is State.NOT_APPLICABLE
    assert recorded.results("nccl-timeout")[0].state is State.NOT_APPLICABLE
    assert recorded.lines("rdma-state", "rdma-rate", "rdma-errors") == [
        "healthy: 1 port active",
        "healthy: 1 x 100 Gb/s",
        "warning rdmap16s27/1: counted: rdma_write_wr_err 4",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (MLX5_STATISTICS, "warning eth0: counted: rx_symbol_err_phy 31"),
        (MLX5_STATISTICS.replace("phy: 31", "phy: 0"), "healthy: 1 interface without errors"),
        (MLX5_STATISTICS.replace("phy: 31", "phy: 0").replace("phy: 26", "phy: 2600"),
         "warning eth0: counted: rx_discards_phy 2,600"),
        (ENA_STATISTICS, "warning eth0: counted: beyond the limit of sent bandwidth: 35,714"),
        (BNXT_STATISTICS, "healthy: 1 interface without errors"),
        (BNXT_STATISTICS.replace("fcs_err_frames: 0", "fcs_err_frames: 8"),
         "warning eth0: counted: rx_fcs_err_frames 8"),
        ("no stats available\n", "not applicable: the interfaces show no error counters"),
    ],
)  # fmt: skip
def test_statistics_of_an_interface_are_read(recorded: RecordedHost, text: str, line: str) -> None:
    recorded.output("ethtool -S eth0", text)

    assert recorded.lines("ethernet-errors") == [line]


def test_disks_limits_and_clock_are_read_of_tools(recorded: RecordedHost) -> None:
    recorded.output("df -h", DF)
    recorded.output("ulimit -a", ULIMIT)
    recorded.output("timedatectl", TIMEDATECTL)
    recorded.port("mlx5_0")

    assert recorded.lines("disk-space", "limits", "shared-memory", "clock-sync") == [
        "error /: 0 B of 1,843 GiB are free",
        "warning: systemd: not synchronised",
        "warning nofile: a process may open 1,024 files",
        "error memlock: a process may lock 64.0 MiB of memory, and RDMA locks its buffers",
        "healthy: /dev/shm has 1,008 GiB",
    ]


def test_the_kernels_log_is_read(recorded: RecordedHost) -> None:
    recorded.output("dmesg", DMESG)

    lines = recorded.lines("kernel-log")
    assert [line.partition(",")[0] for line in lines] == [
        "warning: network link ens1f0np0 went down",
        "error: 0000:5d:00 Xid 79: GPU has fallen off the bus",
    ]
    assert lines[1].endswith("ago")
    recorded.output("dmesg", "dmesg: read kernel buffer failed: Operation not permitted\n")
    assert recorded.results("kernel-log")[0].state is State.NOT_APPLICABLE


NCCL_PREFIXES = (
    "", "[1,0]<stdout>:", "0: ", "(RayWorkerWrapper pid=4711) ",
    "2025-05-16T16:39:51.208-07:00 ",
)  # fmt: skip
"""Of Open MPI (aws/aws-ofi-nccl issue 67), srun -l, Ray and a log collector (issue 889)."""


@pytest.mark.parametrize("prefix", NCCL_PREFIXES)
def test_the_prefix_of_a_launcher_does_not_matter(recorded: RecordedHost, prefix: str) -> None:
    log = "\n".join(
        prefix + line
        for line in (
            "ip-10-0-0-1:14:20 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)",
            "ip-10-0-0-1:14:20 [0] NCCL INFO Using network AWS Libfabric",
            (
                "ip-10-0-0-1:14:20 [0] NCCL INFO Ring 01 : 0[160] -> 1[160] [send] via NET/AWS"
                " Libfabric/0/GDRDMA comm 0x9bbf3b0 nRanks 4096"
            ),
        )
    )

    assert recorded.lines("nccl-transport", nccl_log=log) == [
        "healthy: AWS Libfabric over unknown adapters; GPUDirect RDMA"
    ]


@pytest.mark.parametrize(
    ("line", "state", "reason", "remedy"),
    [
        ("NCCL INFO NET/OFI Selected Provider is tcp (found 1 nics)", State.WARNING,
         "libfabric uses tcp, and no RDMA", "fi_info"),
        (("misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-Y9HfAK to 9637892"
         " bytes"), State.ERROR, "NCCL: Error: failed to extend", "--shm-size"),
        ("transport/net_ib.cc:94 NCCL WARN NET/IB : Got async event : port error", State.ERROR,
         "NCCL: NET/IB : Got async event", "cable"),
        (("misc/ibvwrap.cc:284 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate"
         " memory"), State.ERROR, "NCCL: Call to ibv_reg_mr failed", "ulimit -l"),
        (("misc/ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with error Network is"
         " unreachable"), State.ERROR, "NCCL: Call to ibv_modify_qp", "NCCL_IB_GID_INDEX"),
        (("register_mr_buffers:647 NCCL WARN NET/OFI Unable to register memory (type = 2) for"
         " 1. RC: -22, Error: Invalid argument"), State.ERROR, "NCCL: NET/OFI Unable", "EFA"),
        (("misc/socket.cc:550 NCCL WARN socketStartConnect: Connect to 10.0.0.2<44095> failed :"
         " Software caused connection abort"), State.ERROR, "NCCL: socketStartConnect",
         "NCCL_SOCKET_IFNAME"),
        ("NCCL WARN NET/Plugin: something new", State.WARNING, "NCCL: NET/Plugin", "see the log"),
        ("NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'", State.WARNING,
         "GPUDirect RDMA is off for mlx5_0", "nvidia_peermem"),
    ],
)  # fmt: skip
def test_what_nccl_warns_of_has_a_remedy(
    recorded: RecordedHost, line: str, state: State, reason: str, remedy: str
) -> None:
    # Forms: NVIDIA/nccl issues 1814, 1053, 226; aws/aws-ofi-nccl issue 889; NCCL's sources.
    log = (
        f"n1:1:2 [0] {line}\n"
        "n1:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>\n"
        "n1:1:2 [0] NCCL INFO Using network IB\n"
    )

    (result,) = recorded.results("nccl-transport", nccl_log=log)
    assert result.state is state
    assert result.reason.startswith(reason)
    assert remedy in result.remedy


def test_a_log_without_host_names_is_read(recorded: RecordedHost) -> None:
    # autoscriptlabs/nccl-mesh-plugin issue 56.
    log = (
        ":22901:22901 [0] NCCL INFO NET/IB : Using [4]roceP2p1s0f0:1/RoCE [RO]; OOB eth0:10.0.0.1\n"
        ":22901:22901 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/4\n"
    )

    assert recorded.lines("nccl-transport", nccl_log=log) == [
        "warning: 1 of 1 channel to other hosts without GPUDirect RDMA"
    ]
