from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rankscope.sources.bytedance_file import read_trace_file, what_if_file
from rankscope.tracer.topology import Coords
from tests.support.analysis.bytedance_files import published
from tests.support.traces import TRACES, needs_traces

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path) -> tuple[Path, Path]:
    columns = {
        "dp_rank": [0, 1], "stage": [0, 0], "rank": [4, 9], "step": [7, 7], "seq_id": [0, 3],
        "mc": [0, -1], "mb_id": [0, -1], "start_ts": [0.0, 0.5], "duration": [1.0, 0.25],
        "optype": ["gc", "optimizer"],
    }  # fmt: skip
    pq.write_table(pa.table(columns), folder / "t.parquet")
    plain = dict.fromkeys(("dp_size", "dsp_size", "pp_size", "tp_size", "vpp_size"), 1)
    (folder / "t.yaml").write_text(yaml.safe_dump(plain | {"dp_size": 2, "world_size": 2}))
    return folder / "t.parquet", folder / "t.yaml"


def test_a_trace_file_becomes_a_run_and_its_columns(tmp_path: Path) -> None:
    run, columns = read_trace_file(*write(tmp_path))

    assert (run.run_id, run.source_format, run.world_size) == ("t", "bytedance", 2)
    assert [(info.rank, info.coords) for info in run.epochs[0].ranks] == [
        (4, Coords(dp=0)),
        (9, Coords(dp=1)),
    ]
    assert columns.start_ns.tolist() == [0, 500_000_000]
    assert columns.duration_ns.tolist() == [1_000_000_000, 250_000_000]
    assert [columns.names[code] for code in columns.name.tolist()] == ["gc", "optimizer"]
    assert (columns.seq.tolist(), columns.chunk.tolist()) == ([0, 3], [0, -1])


@needs_traces
@pytest.mark.parametrize("name", ["AR", "ST"])
def test_the_file_alone_gives_the_published_results(name: str) -> None:
    results = json.loads((TRACES / f"result-{name}.json").read_text())
    _, _, m_w, m_s = published(name)

    found = what_if_file(TRACES / f"trace-{name}.parquet", TRACES / f"meta-{name}.yaml")

    result = found.result
    slowdown = results["blocking_slowdown"]
    assert result.slowdown(result.replayed_ns) == pytest.approx(slowdown, rel=1e-6)
    by_step = dict(zip(map(str, result.steps), result.replayed_ns / result.ideal_ns, strict=True))
    assert by_step == pytest.approx(results["blocking_step_slowdown"], rel=1e-6)
    launch = found.actual_ns.mean() / result.replayed_ns.mean()
    assert launch == pytest.approx(results["launch_slowdown"], rel=1e-6)
    for key, parts in (
        ("blocking_decompose_by_dp_rank", result.by_dp_ns),
        ("blocking_decompose_by_stage", result.by_stage_ns),
        ("blocking_decompose_by_optype", result.by_kind_ns),
    ):
        slowdowns = {str(part): result.slowdown(times) for part, times in parts.items()}
        assert slowdowns == pytest.approx(results[key], rel=1e-6)
        for k, step in enumerate(result.steps):
            here = {str(part): times[k] / result.ideal_ns[k] for part, times in parts.items()}
            assert here == pytest.approx(results[f"{key}_per_step"][str(step)], rel=1e-6)
    tolerance = max(2e-6, 1e-6 * slowdown / (slowdown - 1))
    assert (result.m_w, result.m_s) == pytest.approx((m_w, m_s), abs=tolerance)
