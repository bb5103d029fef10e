"""Messages of the kernel, as people posted them in public; each line has its place."""

from __future__ import annotations

import pytest

from rankscope.collector.host.kernel_messages import MessageKind, read_message

XID, SXID, OOM = MessageKind.XID, MessageKind.SXID, MessageKind.OOM_KILLER

LINES = {
    # docs.nvidia.com/deploy/xid-errors and leptonai/gpud #1209
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the"
    " bus.": (XID, "Xid 79: GPU has fallen off the bus", None),
    # NVIDIA/open-gpu-kernel-modules #1150
    "kernel: NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by"
    " previous Xid 149": (XID, "Xid 45: cleanup of a process that ended or was killed", 1818990),
    # stas00/ml-engineering, compute/accelerator/nvidia/debug.md
    "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset"
    " gpu to activate.": (XID, "Xid 63: GPU memory row was remapped, or a page retired", 1896),
    # huggingface.co/datasets/LHRS-UM-FERI/MENTHOS-dataset-rootcause
    "NVRM: Xid (PCI:0000:0f:00): 64, pid=57530, Row Remapper Error: (0x00000005d28c03a0) - All"
    " reserved rows for bank are remapped": (
        XID,
        "Xid 64: GPU memory row could not be remapped, or a page retired",
        57530,
    ),
    # leptonai/gpud #1160 and #1174
    "NVRM: Xid (PCI:0000:00:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00"
    " (0x026001c6 0x00000000)": (XID, "Xid 149: NVLink error (fatal)", None),
    "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008)": (
        XID,
        "Xid 145: NVLink error (non-fatal)",
        None,
    ),
    # leptonai/gpud #1271
    "Jul 09 10:42:47 pool0-0082 kernel: NVRM: knvlinkDiscoverPostRxDetLinks_GH100: Getting peer0's"
    " postRxDetLinkMask failed!": (
        MessageKind.GPU_RESET,
        "NVLinks to another GPU did not come up",
        None,
    ),
    # scitix/sichek #51
    "[Sun Jan 11 09:52:01 2026] NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required"
    " [NV_ERR_RESET_REQUIRED] (0x00000062) returned from status @ kernel_channel.c:2874": (
        MessageKind.GPU_RESET,
        "the NVIDIA driver asks for a reset of a GPU",
        None,
    ),
    "NVRM: Xid (PCI:0000:9b:00): 94, pid=1234, name=python3, Contained ECC error": (
        XID,
        "Xid 94: contained memory error",
        1234,
    ),
    # NVIDIA/NVSentinel #155
    "NVRM: fallen off the bus and is not responding to commands.": (
        XID,
        "Xid 79: GPU has fallen off the bus",
        None,
    ),
    # huggingface.co/datasets/LHRS-UM-FERI/MENTHOS-dataset-rootcause
    "nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Fatal, Link 28 LTSSM Fault Up": (
        SXID,
        "SXid 20034: NVLink, LTSSM fault: the link is down (fatal)",
        None,
    ),
    "nvidia-nvswitch4: SXid (PCI:0000:c6:00.0): 19084, Non-fatal, Link 29 AN1 Heartbeat Timeout": (
        SXID,
        "SXid 19084: NVLink, heartbeat timeout (non-fatal)",
        None,
    ),
    # leptonai/gpud #338
    "kern  :err   : 2025-01-25T10:34:54,859532+00:00 nvidia-nvswitch1: SXid (PCI:0000:84:00.0):"
    " 12028, Data {0x000001c0, 0x00bd5c8a}": (
        SXID,
        "SXid 12028: egress, non-posted access error",
        None,
    ),
    # 0jc1/py-autovod #7
    "[Sun Mar 30 08:24:00 2025] Out of memory: Killed process 7899 (python) total-vm:26184840kB,"
    " anon-rss:15370088kB, file-rss:0kB": (
        OOM,
        "out of memory: killed process 7899 (python)",
        7899,
    ),
    # kubernetes-sigs/aws-efs-csi-driver #1218
    "[18026.221140] Memory cgroup out of memory: Killed process 140339 (python3)"
    " total-vm:120832kB, anon-rss:15596kB": (
        OOM,
        "out of memory: killed process 140339 (python3)",
        140339,
    ),
    # docker/for-linux #1001, by syslog
    "May 15 23:09:30 ubuntu-s-1vcpu-2gb-ams3-01 kernel: [  518.061172] Out of memory: Killed"
    " process 15925 ((resolved)) total-vm:168424kB": (
        OOM,
        "out of memory: killed process 15925 ((resolved)",
        15925,
    ),
    # ROCm/legacy-rocm-build #5724
    "[  950.818199] amdgpu 0000:c5:00.0: amdgpu: GPU reset begin!. Source:  3": (
        MessageKind.GPU_RESET,
        "AMD GPU: GPU reset begin",
        None,
    ),
    # Linux, Documentation/admin-guide/bug-hunting.rst and arch/x86/mm/fault.c
    "python3[4211]: segfault at 0 ip 00007f1c2a sp 00007ffd1 error 4 in"
    " libtorch_cuda.so[7f1+1000]": (
        MessageKind.FAULT,
        "python3 ended with a fault in C code (segfault)",
        4211,
    ),
    # Linux, arch/x86/kernel/cpu/mce/core.c and drivers/edac/edac_mc.c
    "mce: [Hardware Error]: CPU 12: Machine Check: 0 Bank 5: bea0000000000108": (
        MessageKind.MACHINE_CHECK,
        "hardware error of a CPU or of memory ([Hardware Error]: CPU 12: Machine Check)",
        None,
    ),
    # illinois-scicomp/machine-shop-maintenance #66
    "[Mon Oct  3 13:52:42 2022] EDAC MC1: 262 CE memory read error on"
    " CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x2031c14 offset:0x940 grain:32)": (
        MessageKind.MACHINE_CHECK,
        "corrected memory errors (CPU_SrcID#0_Ha#0_Chan#1_DIMM#0)",
        None,
    ),
    # ovro-lwa/lwa-issues #117, by dmesg -H
    "[  +0.000006] EDAC MC3: 1 UE memory read error on CPU_SrcID#1_MC#1_Chan#2_DIMM#0 (channel:2"
    " slot:0 page:0xb757589 offset:0xdc0 grain:32 -  OVERFLOW)": (
        MessageKind.MACHINE_CHECK,
        "uncorrected memory error (CPU_SrcID#1_MC#1_Chan#2_DIMM#0)",
        None,
    ),
    # andikleen/mcelog #116: the only line where a daemon takes the rest
    "[202072.518835] mce: [Hardware Error]: Machine check events logged": (
        MessageKind.MACHINE_CHECK,
        "hardware error of a CPU or of memory ([Hardware Error]: Machine check events logged)",
        None,
    ),
    # Linux, drivers/pci/pcie/aer.c
    "pcieport 0000:16:02.0: AER: Uncorrected (Fatal) error received: 0000:16:02.0": (
        MessageKind.PCIE,
        "PCIe error (Uncorrected (Fatal) error)",
        None,
    ),
    # rwth-i6/returnn #1500
    "[  +0.000844] nvidia 0000:03:00.0: AER: can't recover (no error_detected callback)": (
        MessageKind.PCIE,
        "PCIe error (can't recover)",
        None,
    ),
    # pop-os/pop #3363
    "Sep 19 16:18:02 bubz kernel: [68183.615790] pcieport 0000:00:03.1: AER: Correctable error"
    " message received from 0000:00:00.0": (
        MessageKind.PCIE,
        "PCIe error (Correctable error)",
        None,
    ),
    # Linux, drivers/nvme/host/pci.c
    "nvme nvme0: I/O 384 QID 5 timeout, aborting": (
        MessageKind.DISK,
        "NVMe disk nvme0 does not answer",
        None,
    ),
    "nvme nvme1: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10": (
        MessageKind.DISK,
        "NVMe disk nvme1 does not answer",
        None,
    ),
    # Linux, block/blk-core.c
    "I/O error, dev nvme0n1, sector 500118 op 0x0:(READ) flags 0x80700": (
        MessageKind.DISK,
        "I/O error of disk nvme0n1",
        None,
    ),
    # Linux, fs/ext4/super.c and net/sunrpc
    "EXT4-fs error (device nvme0n1p2): ext4_find_entry:1455: inode #2: comm python": (
        MessageKind.FILE_SYSTEM,
        "file system: EXT4-fs error",
        None,
    ),
    "nfs: server 10.0.0.1 not responding, still trying": (
        MessageKind.FILE_SYSTEM,
        "file system: nfs: server 10.0.0.1 not responding",
        None,
    ),
    # Linux, drivers/net/ethernet/mellanox/mlx5/core/health.c and en_main.c
    "mlx5_core 0000:c1:00.0: health_recovery_work:403: handling bad device here, reset": (
        MessageKind.NETWORK_RESET,
        "network adapter mlx5_core was reset, or failed",
        None,
    ),
    "mlx5_core 0000:ab:00.0 eth0: Link down": (
        MessageKind.LINK,
        "network link eth0 went down",
        None,
    ),
    # NVIDIA/NVSentinel #752
    "mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, High Temperature": (
        MessageKind.LINK,
        "network adapter 0000:5c:00.0: Cable error, High Temperature",
        None,
    ),
    "mlx5_core 0000:12:00.0: mlx5_pcie_event:299: Detected insufficient power on the PCIe slot"
    " (27W).": (
        MessageKind.LINK,
        "network adapter 0000:12:00.0: insufficient power on the PCIe slot",
        None,
    ),
    # Linux, drivers/net/ethernet/broadcom/bnxt/bnxt.c
    "bnxt_en 0000:3b:00.0 enp59s0f0np0: NIC Link is Down": (
        MessageKind.LINK,
        "network link enp59s0f0np0 went down",
        None,
    ),
    # Linux, net/sched/sch_generic.c
    "NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 3 timed out": (
        MessageKind.NETWORK_RESET,
        "network adapter: transmit queue of eth0 timed out",
        None,
    ),
    # Linux, kernel/hung_task.c
    "INFO: task python:12345 blocked for more than 120 seconds.": (
        MessageKind.HUNG_TASK,
        "python has been blocked in the kernel for more than 120 s",
        12345,
    ),
    # Linux, kernel/watchdog.c
    "watchdog: BUG: soft lockup - CPU#12 stuck for 22s! [python:4321]": (
        MessageKind.LOCKUP,
        "a CPU was stuck in the kernel",
        4321,
    ),
    # Linux, arch/x86/kernel/cpu/mce/therm_throt.c
    "CPU3: Core temperature above threshold, cpu clock throttled (total events = 1)": (
        MessageKind.THERMAL,
        "CPUs are throttled because they are too hot",
        None,
    ),
}

OTHERS = (
    # leptonai/gpud #1209
    "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE",
    "mlx5_core 0000:ab:00.0: Port module event: module 0, Cable plugged",
    "EXT4-fs (md127p3): re-mounted 0f3cd65a-338b-4574-bba3-ecef214e1917 r/w. Quota mode: none.",
    # equinor/ert #7797: the victim is in the line after it
    "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,task=perl,pid=1440763,uid=21417",
    "oom_reaper: reaped process 1440763 (perl), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
    "usb 1-1: new high-speed USB device number 2 using xhci_hcd",
    "",
    "\x00\xff garbage " * 200,
)


@pytest.mark.parametrize("line", list(LINES))
def test_a_recorded_line_has_its_meaning(line: str) -> None:
    kind, text, pid = LINES[line]

    message = read_message(line)

    assert message is not None
    assert (message.kind, message.text, message.pid) == (kind, text, pid)
    assert message.remedy


@pytest.mark.parametrize("line", OTHERS)
def test_other_lines_do_not_leave_the_host(line: str) -> None:
    assert read_message(line) is None


@pytest.mark.parametrize(
    ("code", "ends"), [(79, True), (48, True), (13, True), (43, False), (45, False), (63, False)]
)
def test_an_xid_that_follows_another_event_explains_no_end(code: int, ends: bool) -> None:  # noqa: FBT001
    message = read_message(f"NVRM: Xid (PCI:0000:3B:00): {code}, pid=7, name=python3, text")

    assert message is not None
    assert message.ends_process is ends
    assert message.pci == "0000:3b:00"


@pytest.mark.parametrize(
    ("line", "is_serious"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", True),
        ("NVRM: Xid (PCI:0000:3b:00): 13, pid=7, name=python3, Graphics Exception", False),
        ("NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Fatal XC0 i0 Link 13 (0x1)", True),
        ("NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x1)", False),
        ("nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Fatal, Link 28 LTSSM Fault Up", True),
        ("nvidia-nvswitch4: SXid (PCI:0000:c6:00.0): 19084, Non-fatal, Link 29 AN1", False),
        ("EDAC MC3: 1 UE memory read error on DIMM_A1", True),
        ("EDAC MC3: 1 CE memory read error on DIMM_A1", False),
        ("pcieport 0000:16:02.0: AER: Multiple Uncorrected (Fatal) error received", True),
        ("pcieport 0000:16:02.0: AER: Uncorrected (Non-Fatal) error received", False),
    ],
)
def test_what_needs_a_repair_is_serious(line: str, is_serious: bool) -> None:  # noqa: FBT001
    message = read_message(line)

    assert message is not None
    assert message.is_serious is is_serious
