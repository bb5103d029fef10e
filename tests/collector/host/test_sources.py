from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.host.dcgm import DcgmError
from rankscope.collector.host.sampler import Sampler, host_sources
from tests.support.collector.spool_builder import SpoolBuilder, this_host

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rankscope.collector.host.heartbeat import Heartbeat
    from rankscope.collector.host.sample import Sample


def test_two_seconds_of_this_host(tmp_path: Path) -> None:
    # GIVEN: one rank on this machine
    SpoolBuilder(tmp_path, run_id="run", **this_host()).span(step=4)
    beats: list[Heartbeat] = []
    found: list[Sample] = []
    told: list[str] = []

    def take(samples: Sequence[Sample]) -> None:
        found.extend(samples)

    # WHEN
    sources = host_sources(tmp_path, on_heartbeats=beats.extend)
    sampler = Sampler(sources, take, say=told.append, timeout_s=30.0)
    sampler.turn()
    sampler.turn()
    sampler.close()

    # THEN: what any Linux host has is there, and what it lacks is told and no sample
    names = {sample.name.partition(":")[0] for sample in found}
    assert {"memory-total-bytes", "disk-free-bytes", "training-step", "sampler-cpu-ns"} <= names
    assert [beat.step for beat in beats] == [4, 4]
    accounts = sampler.accounts
    assert {name for name, account in accounts.items() if account.num_failed} == set()
    for name, prefix in (("gpu", "gpu-"), ("rdma", "rdma-")):
        assert accounts[name].is_absent is not any(each.startswith(prefix) for each in names)
    assert len(told) == sum(account.is_absent for account in accounts.values())


def test_an_exporter_stands_for_the_driver(tmp_path: Path) -> None:
    names = [each.name for each in host_sources(tmp_path, dcgm_url="http://127.0.0.1:9400/metrics")]
    assert "dcgm" in names
    assert "gpu" not in names
    with pytest.raises(DcgmError):
        host_sources(tmp_path, dcgm_url="file:///metrics")
