"""Profiles of `torch.profiler` in the files and folders that people bring, and siblings of them."""

from __future__ import annotations

import gzip
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.verdict import verdict_sentence
from rankscope.collector.errors import TraceError
from rankscope.collector.store.store import open_store
from rankscope.commands.import_trace import import_files
from rankscope.sources.store_source import StoreSource
from tests.cases.reports import CASES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rankscope.analysis.report.report import RunReport

pytestmark = pytest.mark.slow

PROFILES = CASES / "profiles"
RANKS_MISSING = "ranks 4 to 7 of 8 were not imported"


def analyze_profiles(folder: Path, tmp_path: Path, **options: Any) -> RunReport:  # noqa: ANN401
    url = f"chdb://{tmp_path / 'store'}"
    import_files([folder], file_format="kineto", run_id="run", store_url=url, **options)
    with open_store(url) as store:
        return analyze_run(StoreSource(store), "run")


def check_slow_rank(report: RunReport, *, num_steps: int = 8) -> None:
    """Check that rank 2 is slow, by 14.4 ms of a step without its waits."""
    top = report.top_finding
    assert (top.cause, top.ranks) == ("slow-compute", (2,))
    assert top.saved_s == pytest.approx(0.0144, abs=0.001)
    assert len(report.steps) == num_steps


@pytest.mark.parametrize(
    ("case", "options", "num_steps"),
    [
        ("05-four-of-eight-ranks", {}, 8),
        ("07-no-distributed-info", {}, 8),
        ("09-other-step-name", {"step_name": "train_step"}, 8),
        ("09-other-step-name", {"step_name": "train"}, 8),
        ("10-two-windows", {}, 16),
        ("11-other-files-in-the-folder", {}, 8),
    ],
)
def test_the_slow_rank_of_a_case_is_named(
    tmp_path: Path, case: str, options: dict[str, Any], num_steps: int
) -> None:
    report = analyze_profiles(PROFILES / case, tmp_path, **options)

    check_slow_rank(report, num_steps=num_steps)
    is_missing = any(RANKS_MISSING in warning for warning in report.quality.warnings)
    assert is_missing == case.startswith("05")


def test_ranks_without_files_and_files_without_traces_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "traces"
    shutil.copytree(PROFILES / "05-four-of-eight-ranks", folder)
    (folder / "config.json").write_text("{}")

    analyze_profiles(folder, tmp_path)

    said = capsys.readouterr().err
    assert "ranks 4 to 7 of 8 have no file: the diagnosis is of ranks 0 to 3" in said
    assert f"left out: {folder / 'config.json'}" in said


def test_one_rank_without_a_file_is_named_in_the_singular(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "traces"
    shutil.copytree(PROFILES / "00-control", folder)
    next(folder.glob("*3.json*")).unlink()

    report = analyze_profiles(folder, tmp_path)

    assert "rank 3 of 4 has no file: the diagnosis is of ranks 0 to 2" in capsys.readouterr().err
    assert any("rank 3 of 4 was not imported" in text for text in report.quality.warnings)


def test_a_job_whose_slow_rank_has_no_file_is_not_called_healthy(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    shutil.copytree(PROFILES / "05-four-of-eight-ranks", folder)
    (folder / "rank2.json.gz").unlink()

    report = analyze_profiles(folder, tmp_path)

    assert verdict_sentence(report).startswith("Healthy as far as 3 of 8 ranks show")
    assert any("ranks 2 and 4 to 7 of 8" in warning for warning in report.quality.warnings)


def test_annotations_that_repeat_are_listed_with_their_count(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"--step-name.*train_step \(8 times\)"):
        analyze_profiles(PROFILES / "09-other-step-name", tmp_path)


def edit_traces(
    source: str, folder: Path, name: Callable[[int], str], edit: Callable[[dict[str, Any]], object]
) -> Path:
    """Write the traces of a case with other names and documents.

    Args:
        source: Name of the case.
        folder: Folder to write into.
        name: Returns the name of the file of a rank.
        edit: Changes a document.
    """
    for rank, path in enumerate(sorted((PROFILES / source).glob("rank*.json.gz"))):
        document = json.loads(gzip.decompress(path.read_bytes()))
        edit(document)
        target = folder / name(rank)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(document))
    return folder


WITHOUT_INFO = "07-no-distributed-info"


def test_a_rank_alone_in_the_information_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    ranks = iter(range(4))
    edit_traces(
        WITHOUT_INFO,
        folder,
        lambda rank: f"{'abcd'[rank]}.json",
        lambda document: document.update(distributedInfo={"rank": next(ranks)}),
    )

    check_slow_rank(analyze_profiles(folder, tmp_path))


def test_files_without_ranks_are_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = edit_traces(
        WITHOUT_INFO, tmp_path / "traces", lambda rank: f"{'abcd'[rank]}.json", lambda _: None
    )
    with pytest.raises(TraceError, match=r"names no rank.*rank0\.json.*--rank"):
        analyze_profiles(folder, tmp_path)
    with pytest.raises(TraceError, match="--rank is for one"):
        analyze_profiles(folder, tmp_path, rank=1)

    alone = analyze_profiles(folder / "c.json", tmp_path)
    assert (tuple(alone.coords), alone.world_size) == ((0,), 1)


def test_the_option_names_the_rank_of_one_file(tmp_path: Path) -> None:
    folder = edit_traces(WITHOUT_INFO, tmp_path / "traces", lambda rank: f"{rank}", lambda _: None)

    report = analyze_profiles(folder / "2", tmp_path, rank=2)

    assert (tuple(report.coords), report.world_size) == ((2,), 3)


OLD = {
    "cpu_op": "Operator",
    "user_annotation": "Operator",
    "kernel": "Kernel",
    "cuda_runtime": "Runtime",
}


def test_the_categories_of_torch_1_8_are_read(tmp_path: Path) -> None:
    def age(document: dict[str, Any]) -> None:
        for event in document["traceEvents"]:
            event["cat"] = OLD.get(event["cat"], event["cat"])

    folder = edit_traces(
        "05-four-of-eight-ranks", tmp_path / "traces", lambda rank: f"rank{rank}.json", age
    )

    check_slow_rank(analyze_profiles(folder, tmp_path))


def test_a_profile_without_the_device_of_its_job_is_refused(tmp_path: Path) -> None:
    def drop_kernels(document: dict[str, Any]) -> None:
        events = [event for event in document["traceEvents"] if event["cat"] == "user_annotation"]
        operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 5.0, "dur": 900.0}
        document["traceEvents"] = [*events, {**operator, "pid": 1, "tid": 100, "args": {}}]

    folder = edit_traces(
        "05-four-of-eight-ranks", tmp_path / "traces", lambda rank: f"rank{rank}.json", drop_kernels
    )

    with pytest.raises(TraceError, match=r"no kernels.*ProfilerActivity\.CUDA"):
        analyze_profiles(folder, tmp_path)


def test_a_trace_without_any_step_is_one_step(tmp_path: Path) -> None:
    def drop_steps(document: dict[str, Any]) -> None:
        events = document["traceEvents"]
        document["traceEvents"] = [event for event in events if event["cat"] != "user_annotation"]

    folder = edit_traces(
        "05-four-of-eight-ranks", tmp_path / "traces", lambda rank: f"rank{rank}.json", drop_steps
    )

    report = analyze_profiles(folder, tmp_path)

    assert report.steps == (0,)
    assert report.waterfall is not None
    of_rank_ns = report.waterfall.by_rank_ns.sum(axis=1)
    assert of_rank_ns.tolist() == pytest.approx(4 * [8 * 59.5e6], rel=0.03)


def test_windows_of_steps_without_numbers_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    for window in range(2):

        def move(document: dict[str, Any], begin_us: float = 1e6 * window) -> None:
            for event in document["traceEvents"]:
                event["ts"] += begin_us

        iteration = folder / f"iteration_{9 + window}"
        edit_traces("09-other-step-name", iteration, "rank{}_trace.json".format, move)

    check_slow_rank(analyze_profiles(folder, tmp_path, step_name="train_step"), num_steps=16)

    shutil.copytree(folder / "iteration_9", folder / "iteration_8")
    with pytest.raises(TraceError, match="of the same time as another file of rank 0"):
        analyze_profiles(folder, tmp_path / "again", step_name="train_step")
