"""Names of samples in docs/samples.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.collector.host.gpu import LINK_FIELDS, GpuSource
from rankscope.collector.host.nic import COUNTERS as NIC_COUNTERS
from rankscope.collector.host.nic import PATTERNS
from rankscope.collector.host.rdma import DRIVER_COUNTERS, PORT_COUNTERS, STATE_NAME
from rankscope.collector.host.sampler import Sampler, host_sources
from rankscope.collector.host.system import PROCESS_NAME
from tests.collector.host.test_gpu import FakeNvml
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.host.sample import Sample

PAGE = ROOT / "docs" / "samples.md"


def test_every_name_is_in_the_table(tmp_path: Path) -> None:
    found: list[Sample] = []
    sampler = Sampler(host_sources(tmp_path), found.extend, timeout_s=30.0)
    sampler.turn()
    sampler.turn()
    sampler.close()
    found += GpuSource(load=FakeNvml).read(0)
    names = {sample.name.partition(":")[0] for sample in found}
    names |= {name for name, _ in PORT_COUNTERS.values()} | set(DRIVER_COUNTERS.values())
    names |= {name for _, name in PATTERNS}
    names |= {PROCESS_NAME, STATE_NAME} | set(NIC_COUNTERS.values()) | set(LINK_FIELDS.values())
    page = PAGE.read_text(encoding="utf-8")

    assert [
        name for name in sorted(names) if f"`{name}`" not in page and f"`{name}:" not in page
    ] == []
