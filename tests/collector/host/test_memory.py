from __future__ import annotations

from pathlib import Path

from rankscope.collector.host.system import MemorySource


def test_this_machines_memory_is_what_the_kernel_says() -> None:
    kernel = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())

    found = {sample.name: sample.value for sample in MemorySource().read(3)}

    assert found["memory-total-bytes"] == int(kernel["MemTotal"].split()[0]) * 1024
    assert found["swap-total-bytes"] == int(kernel["SwapTotal"].split()[0]) * 1024
    assert 0 < found["memory-available-bytes"] < found["memory-total-bytes"]
