"""Profiles of `torch.profiler` in the forms that people bring, and siblings of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.report.report import Severity
from rankscope.collector.store.store import open_store
from rankscope.commands.import_trace import import_files
from rankscope.sources.store_source import StoreSource
from tests.cases.reports import CASES
from tests.support.collector.profiled_job import ProfiledJob

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.analysis.report.report import RunReport

pytestmark = pytest.mark.slow

PROFILES = CASES / "profiles"
ALARMS = (Severity.CRITICAL, Severity.WARNING)


def analyze_profiles(folder: Path, tmp_path: Path, **options: Any) -> RunReport:  # noqa: ANN401
    url = f"chdb://{tmp_path / 'store'}"
    import_files([folder], file_format="kineto", run_id="run", store_url=url, **options)
    with open_store(url) as store:
        return analyze_run(StoreSource(store), "run")


def part_ms(report: RunReport, rank: int, part: str) -> float:
    """Return the time of a part in a step of a rank."""
    waterfall = report.waterfall
    assert waterfall is not None
    time_ns = waterfall.by_rank_ns[waterfall.ranks.index(rank), waterfall.parts.index(part)]
    return float(time_ns) / len(report.steps) / 1e6


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("00-control", "slow-compute"),
        ("01-torch-before-2.4", "slow-compute"),
        ("02-rccl-two-groups", "slow-compute"),
        ("03-deep-ep", "slow-compute"),
        ("04-launch-bound", "host-stall"),
        ("22-coalesced", "slow-compute"),
    ],
)
def test_the_slow_rank_of_a_profile_is_named(tmp_path: Path, case: str, cause: str) -> None:
    report = analyze_profiles(PROFILES / case, tmp_path)

    top = report.top_finding
    assert (top.cause, top.ranks, top.severity) == (cause, (2,), Severity.CRITICAL)
    assert top.saved_s == pytest.approx(0.0144, abs=0.001)
    assert [finding.cause for finding in report.findings if finding.severity in ALARMS] == [cause]
    assert len(report.steps) == 8
    is_assumed = any("one group of all ranks" in warning for warning in report.quality.warnings)
    assert is_assumed == (case == "01-torch-before-2.4")
    assert (report.layout.dp, report.layout.tp) == ((2, 2) if case.startswith("02") else (4, 1))
    if case == "04-launch-bound":
        for rank in range(4):
            assert part_ms(report, rank, "useful_compute") == pytest.approx(17.0, abs=0.1)
        # With the pace of the other hosts, 300 launches take 30 instead of 45 ms, and not none.
        assert report.step_time_s.actual is not None
        assert report.reachable_step_s == pytest.approx(report.step_time_s.actual - 0.015, rel=0.01)


def test_kernels_that_wait_elsewhere_make_no_rank_slow(tmp_path: Path) -> None:
    report = analyze_profiles(PROFILES / "19-comm-ends-elsewhere-one-rank", tmp_path)

    assert [finding.cause for finding in report.findings] == ["healthy"]
    assert part_ms(report, 0, "useful_compute") == pytest.approx(60.3, abs=0.7)


LAUNCH_BOUND: dict[str, Any] = {"num_kernels": 40, "kernel": 0.1, "pace": 0.3}


@pytest.mark.parametrize(
    ("job", "cause", "rank"),
    [
        (ProfiledJob(**LAUNCH_BOUND, slow_host={0: 1.8}, num_ranks=3), "host-stall", 0),
        (ProfiledJob(**LAUNCH_BOUND, slow_host={5: 1.3}, num_ranks=8), "host-stall", 5),
        (ProfiledJob(**LAUNCH_BOUND, slow_kernels={3: 4.5}), "slow-compute", 3),
        (ProfiledJob(num_kernels=200, kernel=0.2, slow_kernels={1: 1.25}), "slow-compute", 1),
    ],
    ids=["host of 3 ranks", "host of 8 ranks", "kernels longer than the pace", "many kernels"],
)
def test_late_launches_are_the_hosts_and_long_kernels_the_devices(
    tmp_path: Path, job: ProfiledJob, cause: str, rank: int
) -> None:
    report = analyze_profiles(job.write(tmp_path / "traces"), tmp_path)

    top = report.top_finding
    assert (top.cause, top.ranks, top.severity) == (cause, (rank,), Severity.CRITICAL)
    computed = job.kernel * job.num_kernels * 0.994 + 2
    assert part_ms(report, (rank + 1) % 3, "useful_compute") == pytest.approx(computed, rel=0.02)


def test_longer_kernels_between_late_launches_delay_no_rank(tmp_path: Path) -> None:
    job = ProfiledJob(**LAUNCH_BOUND | {"num_kernels": 200}, slow_kernels={1: 2.5})

    report = analyze_profiles(job.write(tmp_path / "traces"), tmp_path)

    assert not [finding for finding in report.findings if finding.severity in ALARMS]


def test_a_host_that_is_late_for_a_first_launch_is_not_said_to_wait_for_input(
    tmp_path: Path,
) -> None:
    delays = {(rank, step): (3 * rank + 5 * step) % 7.0 for rank in range(4) for step in range(12)}
    job = ProfiledJob(num_kernels=300, kernel=0.05, pace=0.1, num_steps=12, delays=delays)

    report = analyze_profiles(job.write(tmp_path / "traces"), tmp_path)

    assert [finding.cause for finding in report.findings] == ["healthy"]
    assert report.waterfall is not None
    assert report.waterfall.mean_ratio["input"] == 0
    assert report.waterfall.mean_ratio["host_gap"] == pytest.approx(0.5, abs=0.1)


PAIRS: dict[str, tuple[str, tuple[int, ...]]] = {
    "0": ("mesh_dp", tuple(range(8))),
    **{f"tp{n}": ("mesh_tp", (2 * n, 2 * n + 1)) for n in range(4)},
}
UNNAMED: dict[str, Any] = {"comm_name": "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"}
FORMS: dict[str, ProfiledJob] = {
    "a call around the launch": ProfiledJob(
        num_ranks=8, groups=PAIRS, call={"Process Group Name": "0"}, **UNNAMED
    ),
    "the ranks of a call, without a list of groups": ProfiledJob(
        num_ranks=8,
        groups={},
        call={"Process Group Name": "7", "Process Group Ranks": str([*range(8)])},
        **UNNAMED,
    ),
    "the only group with an axis of the library": ProfiledJob(
        num_ranks=8,
        groups={**PAIRS, "ep": ("mesh_ep", tuple(range(8)))},
        comm_name="void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(int*)",
    ),
}


@pytest.mark.parametrize("job", FORMS.values(), ids=FORMS)
def test_the_group_is_found_in_whichever_form_it_is_there(tmp_path: Path, job: ProfiledJob) -> None:
    job.slow_kernels = {6: 1.5}

    report = analyze_profiles(job.write(tmp_path / "traces"), tmp_path)

    top = report.top_finding
    assert (top.cause, top.ranks, top.severity) == ("slow-compute", (6,), Severity.CRITICAL)
    assert {starved.waits_on[0].rank for starved in report.starved} == {6}
    assert not any("process group" in warning for warning in report.quality.warnings)


def test_communication_of_an_unknown_group_is_said_and_blames_no_link(tmp_path: Path) -> None:
    job = ProfiledJob(num_ranks=8, groups=PAIRS, slow_kernels={6: 1.5}, **UNNAMED)

    report = analyze_profiles(job.write(tmp_path / "traces"), tmp_path)

    assert (report.top_finding.cause, report.top_finding.ranks) == ("slow-compute", (6,))
    assert [finding.cause for finding in report.findings if finding.severity in ALARMS] == [
        "slow-compute"
    ]
    assert any("ncclDevKernel_Generic_1" in warning for warning in report.quality.warnings)


def test_a_kernel_of_an_unknown_library_is_communication_if_an_option_names_it(
    tmp_path: Path,
) -> None:
    job = ProfiledJob(slow_kernels={1: 1.4}, comm_name="acme::fabric_send_recv_v2<float>(float*)")
    folder = job.write(tmp_path / "traces")

    without = analyze_profiles(folder, tmp_path / "without")
    named = analyze_profiles(folder, tmp_path / "named", comm_kernel=["acme::fabric"])

    assert without.top_finding.cause == "insufficient-evidence"
    assert any("acme::fabric_send_recv" in warning for warning in without.quality.warnings)
    assert (named.top_finding.cause, named.top_finding.ranks) == ("slow-compute", (1,))
