"""Builder of a recorded host: a folder with its proc and sys, and the output of its tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.doctor.checks.table import HOST_CHECKS
from rankscope.doctor.examination import examine_host
from rankscope.doctor.host import COMMANDS, Host

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.doctor.result import Result

GPU = """
  <gpu id="00000000:{bus:02X}:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <persistence_mode>Enabled</persistence_mode>
    <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
    <uuid>GPU-513536b6-7d19-9063-b049-1e69664bb29{index}</uuid>
    <gpu_reset_status>
      <reset_required>No</reset_required>
      <drain_and_reset_recommended>No</drain_and_reset_recommended>
    </gpu_reset_status>
    <gpu_recovery_action>None</gpu_recovery_action>
    <pci>
      <pci_bus_id>00000000:{bus:02X}:00.0</pci_bus_id>
      <pci_gpu_link_info>
        <pcie_gen>
          <max_link_gen>5</max_link_gen>
          <current_link_gen>5</current_link_gen>
          <device_current_link_gen>5</device_current_link_gen>
          <max_device_link_gen>5</max_device_link_gen>
          <max_host_link_gen>5</max_host_link_gen>
        </pcie_gen>
        <link_widths>
          <max_link_width>16x</max_link_width>
          <current_link_width>16x</current_link_width>
        </link_widths>
      </pci_gpu_link_info>
    </pci>
    <performance_state>P0</performance_state>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
      <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
      <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
      <clocks_event_reason_hw_power_brake_slowdown>Not Active\
</clocks_event_reason_hw_power_brake_slowdown>
      <clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
    </clocks_event_reasons>
    <compute_mode>Default</compute_mode>
    <utilization><gpu_util>0 %</gpu_util></utilization>
    <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
    <ecc_errors>
      <volatile>
        <sram_correctable>0</sram_correctable>
        <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
        <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
        <dram_correctable>0</dram_correctable>
        <dram_uncorrectable>0</dram_uncorrectable>
      </volatile>
      <aggregate>
        <dram_correctable>0</dram_correctable>
        <dram_uncorrectable>0</dram_uncorrectable>
        <sram_threshold_exceeded>No</sram_threshold_exceeded>
      </aggregate>
    </ecc_errors>
    <retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
    <remapped_rows>
      <remapped_row_corr>0</remapped_row_corr>
      <remapped_row_unc>0</remapped_row_unc>
      <remapped_row_pending>No</remapped_row_pending>
      <remapped_row_failure>No</remapped_row_failure>
      <row_remapper_histogram>
        <row_remapper_histogram_max>2560 bank(s)</row_remapper_histogram_max>
        <row_remapper_histogram_none>0 bank(s)</row_remapper_histogram_none>
      </row_remapper_histogram>
    </remapped_rows>
    <gpu_power_readings>
      <current_power_limit>700.00 W</current_power_limit>
      <default_power_limit>700.00 W</default_power_limit>
    </gpu_power_readings>
    <clocks><sm_clock>1980 MHz</sm_clock></clocks>
    <max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks>
    <fabric><state>Completed</state><status>Success</status></fabric>
    <processes></processes>
  </gpu>"""
"""One GPU of `nvidia-smi -q -x`, shortened to what is read. Source of its form:
influxdata/telegraf, ``plugins/inputs/nvidia_smi/testdata/a100-sxm4-v12.xml`` and
``pro-6000-maxq-blackwell-v13.xml``."""


def gpu_report(num: int = 8, *, changes: dict[int, dict[str, str]] | None = None) -> str:
    """Return the report of some GPUs.

    Args:
        num: Number of GPUs.
        changes: Texts to replace, by the number of the GPU. Each must occur.
    """
    gpus = []
    for index in range(num):
        text = GPU.format(index=index, bus=0x19 + 16 * index)
        for old, new in (changes or {}).get(index, {}).items():
            assert old in text, old
            text = text.replace(old, new)
        gpus.append(text)
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
        "<nvidia_smi_log>\n  <driver_version>550.54.15</driver_version>\n"
        f"  <cuda_version>12.4</cuda_version>\n  <attached_gpus>{num}</attached_gpus>"
        f"{''.join(gpus)}\n</nvidia_smi_log>\n"
    )


class RecordedHost:
    """A recorded host, at first without any file.

    Args:
        root: An empty folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        """Write a file of the host."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def output(self, command: str, text: str) -> None:
        """Record the output of a tool."""
        self.write(f"{COMMANDS}/{command.replace(' ', '_')}", text)

    def device(self, address: str, **attributes: str) -> Path:
        """Add a device of the PCI bus; its path names the bridges above it."""
        folder = self.root / "sys/devices" / address
        folder.mkdir(parents=True)
        for name, text in attributes.items():
            (folder / name.rstrip("_")).write_text(text + "\n", encoding="utf-8")
        links = self.root / "sys/bus/pci/devices"
        links.mkdir(parents=True, exist_ok=True)
        (links / folder.name).symlink_to(folder)
        return folder

    def port(self, device: str, port: str = "1", **files: str) -> None:
        """Add an RDMA port; the files are those of an active one unless given.

        Args:
            device: Name of the adapter.
            port: Number of the port.
            files: Texts by name; ``counters__x`` is the file ``counters/x``, and ``device__x`` a
                file of the adapter.
        """
        texts = {
            "state": "4: ACTIVE",
            "phys_state": "5: LinkUp",
            "rate": "400 Gb/sec (4X NDR)",
            "link_layer": "InfiniBand",
            "device__hca_type": "MT4129",
            "device__fw_ver": "28.39.1002",
            "device__sys_image_guid": f"58a2:e103:00da:{abs(hash(device)) % 10_000:04}",
        } | files
        base = f"/sys/class/infiniband/{device}"
        for name, text in texts.items():
            of_device = name.startswith("device__")
            path = name.removeprefix("device__").replace("__", "/")
            self.write(f"{base}/{path}" if of_device else f"{base}/ports/{port}/{path}", text)

    def results(self, *names: str, **options: object) -> list[Result]:
        """Return the results of some checks, or of all."""
        options.setdefault("environment", {})
        host = Host(root=self.root, name="gpu07", **options)  # type: ignore[arg-type]  # by a test
        checks = [check for check in HOST_CHECKS if not names or check.name in names]
        return examine_host(host, checks=checks)

    def lines(self, *names: str, **options: object) -> list[str]:
        """Return the same as short lines."""
        return [
            " ".join(filter(None, (str(result.state), result.part))) + f": {result.reason}"
            for result in self.results(*names, **options)
        ]
