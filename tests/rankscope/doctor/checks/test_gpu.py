"""Checks of GPUs, on recorded outputs of `nvidia-smi`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.doctor.checks.gpu import judge_ecc, judge_pcie, judge_remaps, judge_throttle
from rankscope.doctor.checks.nvidia_smi import parse_links, parse_topology
from rankscope.doctor.checks.nvml import read_nvml_report
from rankscope.doctor.result import State
from tests.collector.host.test_gpu import FakeNvml
from tests.support.rankscope.recorded_host import RecordedHost, gpu_report

if TYPE_CHECKING:
    from pathlib import Path

INACTIVE_LINKS = """\
GPU 2: Tesla V100-SXM2-32GB (UUID: GPU-a8adca3f-8b20-1970-1626-2c5aa039f544)
\t Link 0: 25.781 GB/s
\t Link 1: 25.781 GB/s
\t Link 2: 25.781 GB/s
\t Link 3: 25.781 GB/s
\t Link 4: 25.781 GB/s
\t Link 5: 25.781 GB/s
GPU 3: Tesla V100-SXM2-32GB (UUID: GPU-90e3dab0-b59d-8bf6-d909-d4fab8d2f29b)
\t Link 0: 25.781 GB/s
\t Link 1: 25.781 GB/s
\t Link 2: 25.781 GB/s
\t Link 3: <inactive>
\t Link 4: 25.781 GB/s
\t Link 5: <inactive>
"""
"""Source: Azure/azhpc-diagnostics issue 73."""

LINK_ERRORS = """\
GPU 2: Tesla V100-SXM2-32GB (UUID: GPU-a8adca3f-8b20-1970-1626-2c5aa039f544)
\t Link 0: Replay Errors: 0
\t Link 0: Recovery Errors: 0
\t Link 0: CRC Errors: 0
\t Link 1: Replay Errors: 3
\t Link 1: Recovery Errors: 0
\t Link 1: CRC Errors: 12
"""
"""Source of its form: nvidia-smi(1), ``nvlink --errorcounters``."""

TOPOLOGY = """\
\tGPU0\tGPU1\tGPU4\tNIC0\tNIC1\tNIC2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV8\tNV8\tNODE\tSYS\tPIX\t0-47,96-143\t0
GPU1\tNV8\t X \tNV8\tNODE\tSYS\tNODE\t0-47,96-143\t0
GPU4\tNV8\tNV8\t X \tSYS\tPIX\tSYS\t48-95,144-191\t1
NIC0\tNODE\tNODE\tSYS\t X \tSYS\tNODE
NIC1\tSYS\tSYS\tPIX\tSYS\t X \tSYS
NIC2\tPIX\tNODE\tSYS\tNODE\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
  NIC2: mlx5_2
"""
"""Source: NVIDIA/nccl issue 933, shortened to three GPUs and three adapters."""


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedHost:
    return RecordedHost(tmp_path)


def test_eight_healthy_gpus_deviate_in_nothing(recorded: RecordedHost) -> None:
    recorded.output("nvidia-smi -q -x", gpu_report())

    found = [result for result in recorded.results() if result.section == "GPUs"]

    assert [result.check for result in found if result.is_deviation] == []
    healthy = {result.check: result for result in found if result.state is State.HEALTHY}
    assert healthy.keys() == {
        "gpu-count", "gpu-ecc", "gpu-row-remap", "gpu-throttle", "gpu-pcie", "gpu-fabric",
        "gpu-persistence", "gpu-mode",
    }  # fmt: skip
    assert healthy["gpu-count"].value == "8 x NVIDIA H100 80GB HBM3"


def test_without_a_gpu_nothing_is_healthy(recorded: RecordedHost) -> None:
    found = [result for result in recorded.results() if result.section == "GPUs"]

    assert {result.state for result in found} == {State.NOT_APPLICABLE}


@pytest.mark.parametrize(
    ("check", "old", "new", "line"),
    [
        ("gpu-ecc", "<dram_uncorrectable>0", "<dram_uncorrectable>5",
         "error GPU 3: 5 uncorrectable memory errors since the driver was loaded"),
        ("gpu-ecc", "<dram_correctable>0", "<dram_correctable>7",
         "warning GPU 3: 7 corrected memory errors since the driver was loaded"),
        ("gpu-ecc", "<sram_threshold_exceeded>No", "<sram_threshold_exceeded>Yes",
         "error GPU 3: sram threshold exceeded"),
        ("gpu-row-remap", "pending>No</remapped", "pending>Yes</remapped",
         "error GPU 3: a bad memory row waits to be remapped"),
        ("gpu-row-remap", "failure>No", "failure>Yes",
         "error GPU 3: a memory row could not be remapped"),
        ("gpu-row-remap", "none>0 bank", "none>1 bank",
         "warning GPU 3: a memory bank has no spare row left"),
        ("gpu-pcie", "<current_link_width>16x", "<current_link_width>8x",
         "error GPU 3: the PCIe link has 8 of 16 lanes"),
        ("gpu-persistence", "persistence_mode>Enabled", "persistence_mode>Disabled",
         "warning GPU 3: persistence is off: each start of a job initialises the GPU anew"),
        ("gpu-mode", "current_mig>Disabled", "current_mig>Enabled",
         "warning GPU 3: MIG is on: a job gets a part of the GPU, and NCCL no NVLink"),
        ("gpu-fabric", "<state>Completed", "<state>In Progress",
         "error GPU 3: the NVSwitch fabric is not ready: In Progress, Success"),
        ("gpu-count", "action>None", "action>Reset",
         "error GPU 3: the driver asks for recovery: Reset"),
        ("gpu-throttle", "limit>700.00 W</current", "limit>400.00 W</current",
         "warning GPU 3: the power limit is 400 W, and 700 W by default"),
    ],
)  # fmt: skip
def test_one_bad_gpu_is_named(
    recorded: RecordedHost, check: str, old: str, new: str, line: str
) -> None:
    text = gpu_report(changes={3: {old: new}})
    recorded.output("nvidia-smi -q -x", text)

    assert line in recorded.lines(check)
    assert [result.device[-1] for result in recorded.results(check) if result.device] in ([], ["3"])
    deviating = {result.check for result in recorded.results() if result.is_deviation}
    assert deviating - {check, "gpudirect"} == set()


def test_a_narrow_slot_of_all_gpus_is_a_warning(recorded: RecordedHost) -> None:
    # influxdata/telegraf's a10g.xml and tesla-t4.xml: instances of a cloud with slots of 8 lanes.
    changes = {gpu: {"<current_link_width>16x": "<current_link_width>8x"} for gpu in range(2)}
    recorded.output("nvidia-smi -q -x", gpu_report(2, changes=changes))

    assert {result.state for result in recorded.results("gpu-pcie")} == {State.WARNING}


def test_a_power_brake_is_named_with_the_clock(recorded: RecordedHost) -> None:
    reasons = {
        f"{name}>Not Active": f"{name}>Active"
        for name in ("hw_power_brake_slowdown", "hw_slowdown")
    }
    clock = {"<clocks><sm_clock>1980": "<clocks><sm_clock>1350"}
    recorded.output("nvidia-smi -q -x", gpu_report(changes={5: reasons | clock}))

    assert recorded.lines("gpu-throttle") == [
        "error GPU 5: power brake: the power supply asks for less (now 1,350 of 1,980 MHz)"
    ]


def test_a_low_generation_is_an_error_only_in_use(recorded: RecordedHost) -> None:
    idle = {"<current_link_gen>5": "<current_link_gen>1"}
    recorded.output("nvidia-smi -q -x", gpu_report(changes={0: idle}))
    assert recorded.lines("gpu-pcie") == ["healthy: 8 GPUs: all lanes"]

    recorded.output("nvidia-smi -q -x", gpu_report(changes={0: idle | {"0 %": "97 %"}}))
    assert recorded.lines("gpu-pcie") == [
        "error GPU 0: the PCIe link runs at generation 1 of 5 in use"
    ]


def test_a_gpu_that_fell_off_the_bus_is_missing(recorded: RecordedHost) -> None:
    for bus in range(8):
        address = f"pci0000:{bus:02x}/0000:{bus:02x}:00.0"
        recorded.device(address, vendor="0x10de", class_="0x030200")
    recorded.device("pci0000:f0/0000:f0:00.0", vendor="0x10de", class_="0x068000")  # an NVSwitch
    recorded.output("nvidia-smi -q -x", gpu_report(7))

    assert recorded.lines("gpu-count") == ["error: the driver lists 7 of 8 GPUs on the PCI bus"]
    assert recorded.lines("gpu-count", expected_gpus=7) == ["healthy: 7 x NVIDIA H100 80GB HBM3"]


@pytest.mark.parametrize(
    "message",
    [
        # JosephKJ/OWOD issue 81, NVIDIA/open-gpu-kernel-modules issue 387.
        "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.",
        "Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error.",
        "Failed to initialize NVML: Driver/library version mismatch",
    ],
)
def test_a_message_of_the_driver_is_an_error(recorded: RecordedHost, message: str) -> None:
    recorded.output("nvidia-smi -q -x", message)

    (line,) = recorded.lines("gpu-count")

    assert line == f"error: nvidia-smi: {message}"


def test_a_tool_without_a_driver_is_no_error_without_a_gpu(recorded: RecordedHost) -> None:
    recorded.device("pci0000:00/0000:00:01.0", vendor="0x15b3", class_="0x020000")
    recorded.output(
        "nvidia-smi -q -x",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure"
        " that the latest NVIDIA driver is installed and running.",
    )

    assert recorded.lines("gpu-count") == ["not applicable: this host has no NVIDIA GPU"]


def test_visible_devices_that_do_not_exist_are_an_error(recorded: RecordedHost) -> None:
    recorded.output("nvidia-smi -q -x", gpu_report(4))
    visible = {"CUDA_VISIBLE_DEVICES": "0,1,7"}

    (line,) = recorded.lines("gpu-count", environment=visible)

    assert line.startswith("error: CUDA_VISIBLE_DEVICES=0,1,7: there is no GPU 7")


def test_the_library_is_read_without_the_tool() -> None:
    fake = FakeNvml()
    fake.reasons = 0x88  # a hardware slowdown, by the power brake
    fake.answers |= {
        "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 16 - 8 * handle,
        "nvmlDeviceGetEccMode": lambda _: (1, 1),
        "nvmlDeviceGetRemappedRows": lambda handle: (0, 0, handle, 0),
        "nvmlSystemGetDriverVersion": lambda: b"550.54.15",
        "nvmlSystemGetCudaDriverVersion": lambda: 12_040,
    }

    report = read_nvml_report(lambda: fake)

    assert (report.driver, report.cuda, len(report.gpus)) == ("550.54.15", "12.4", 2)
    second = report.gpus[1]
    assert [out.reason for out in judge_throttle(second)] == [
        "power brake: the power supply asks for less"
    ]
    assert [out.reason for out in judge_pcie(second, 16)] == ["the PCIe link has 8 of 16 lanes"]
    assert [out.state for out in judge_remaps(second)] == [State.ERROR]
    assert next(judge_ecc(second)).reason == (
        "1 uncorrectable memory error since the driver was loaded"
    )
    assert not fake.is_open


def test_no_library_is_no_gpu() -> None:
    def load() -> object:
        raise ImportError

    assert read_nvml_report(load).gpus == ()


def test_processes_are_an_error_before_a_job_only(recorded: RecordedHost) -> None:
    process = "<process_info><pid>4711</pid></process_info></processes>"
    changes = {2: {"</processes>": process}}
    recorded.output("nvidia-smi -q -x", gpu_report(changes=changes))

    assert recorded.results("gpu-processes")[0].state is State.NOT_APPLICABLE
    assert recorded.lines("gpu-processes", is_before_job=True) == [
        "error GPU 2: pid 4711 of an earlier job uses it"
    ]


def test_inactive_links_and_link_errors_are_found(recorded: RecordedHost) -> None:
    recorded.output("nvidia-smi -q -x", gpu_report(4))
    recorded.output("nvidia-smi nvlink -s", INACTIVE_LINKS)
    recorded.output("nvidia-smi nvlink -e", LINK_ERRORS)

    assert parse_links(INACTIVE_LINKS)[3].inactive == [3, 5]
    assert recorded.lines("gpu-nvlink") == [
        "warning GPU 2: NVLink counts 3 Replay Errors, 12 CRC Errors",
        "error GPU 3: 4 of 6 NVLink links are active (inactive: 3, 5)",
    ]


def test_a_gpu_without_a_near_adapter_is_found(recorded: RecordedHost) -> None:
    recorded.output("nvidia-smi -q -x", gpu_report(5))
    recorded.output("nvidia-smi topo -m", TOPOLOGY)

    assert parse_topology(TOPOLOGY)[1] == {"mlx5_0": "NODE", "mlx5_1": "SYS", "mlx5_2": "NODE"}
    assert recorded.lines("nic-affinity") == [
        "warning GPU 1: its nearest RDMA adapter is NODE away, and PIX for other GPUs"
    ]


def test_the_bus_shows_distances_without_the_tool(recorded: RecordedHost) -> None:
    switch = "pci0000:17/0000:17:01.0/0000:18:00.0"
    gpu = {"vendor": "0x10de", "class_": "0x030200"}
    recorded.device(f"{switch}/0000:19:00.0/0000:1a:00.0", **gpu, numa_node="0")
    recorded.device("pci0000:99/0000:99:01.0/0000:9a:00.0", **gpu, numa_node="1")
    near = recorded.device(f"{switch}/0000:19:01.0/0000:1b:00.0", vendor="0x15b3", class_="0x0207",
                           numa_node="0")  # fmt: skip
    recorded.port("mlx5_0")
    (recorded.root / "sys/class/infiniband/mlx5_0/device").symlink_to(near)

    assert recorded.lines("nic-affinity") == [
        "warning GPU 1: its nearest RDMA adapter is SYS away, and PIX for other GPUs"
    ]
