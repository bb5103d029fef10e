from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.analysis.report.report import Mfu
from rankscope.analysis.trace.tables import RunSummary
from rankscope.dashboard.address import TIMELINE, View
from rankscope.dashboard.pages import overview
from rankscope.dashboard.pages import timeline as timeline_page
from rankscope.dashboard.records.progress import (
    Activity,
    AnalysisFailed,
    AnalysisInProgress,
    MarkedSteps,
    Progress,
)
from rankscope.tracer.topology import Layout
from tests.support.dashboard.builders import FakeProvider, report
from tests.support.dashboard.page_text import rendered, words
from tests.support.dashboard.training_builder import training_provider

RUN = RunSummary(
    run_id="demo-42",
    source_format="rankscope",
    state="ended",
    world_size=12_288,
    layout=Layout(dp=192, pp=8, tp=8),
    num_spans=18_087_936,
    num_steps=4,
    started_ns=None,
)
SEEN = MarkedSteps(
    epochs=(0,),
    actual_s_by_step={2: 1.5, 3: 2.5},
    mfu=Mfu(convention="as declared", mean=0.324, by_step={2: 0.36, 3: 0.288}),
)


def under_way(
    activity: Activity, *, num_spans: int = 0, steps: MarkedSteps | None = None
) -> AnalysisInProgress:
    return AnalysisInProgress(
        run=RUN,
        progress=Progress(activity=activity, num_spans=num_spans),
        elapsed_s=12.4,
        steps=steps,
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (under_way(Activity.WAITING), "No verdict yet: other runs are analysed first."),
        (under_way(Activity.READING), "No verdict yet: reading the records of 12,288 ranks."),
        (
            under_way(Activity.COMPARING, num_spans=4_521_984),
            "No verdict yet: replaying 4,521,984 spans and comparing the ranks.",
        ),
    ],
)
def test_the_overview_shows_the_progress_of_the_analysis(
    found: AnalysisInProgress, said: str
) -> None:
    provider = FakeProvider(reports={"demo-42": None}, unfinished={"demo-42": found})

    shown = words(rendered(overview.PAGE, provider, View(run="demo-42")))

    assert f"analysis in progress | {said}" in shown
    assert "12,288 ranks | DP 192 x TP 8 x PP 8 | 4 steps | 18,087,936 spans | ended" in shown
    assert "12 s so far" in shown


def test_what_needs_no_analysis_is_shown_during_it() -> None:
    top = replace(report().findings[0], ranks=tuple(range(6_144, 6_152)), steps=(2, 3))
    found = replace(under_way(Activity.READING, steps=SEEN), earlier_findings=(top,))
    provider = FakeProvider(reports={"demo-42": None}, unfinished={"demo-42": found})

    shown = words(rendered(overview.PAGE, provider, View(run="demo-42")))

    assert "step time | 2.00 s | mean, as marked by the ranks" in shown
    assert "MFU | 32.4 % | mean of 2 steps" in shown
    earlier = "Found before this analysis:  | slow-compute |  on ranks 6144 to 6151, steps 2 to 3."
    assert earlier in shown


def test_a_failed_analysis_shows_the_reason() -> None:
    found = AnalysisFailed(run=RUN, reason="the store cannot lock", steps=SEEN)
    provider = FakeProvider(reports={"demo-42": None}, unfinished={"demo-42": found})

    shown = words(rendered(overview.PAGE, provider, View(run="demo-42")))

    assert "No verdict: this run could not be analysed. | the store cannot lock" in shown
    assert "step time | 2.00 s" in shown


def test_a_step_is_shown_during_the_analysis() -> None:
    provider = training_provider()
    provider.unfinished = {"demo-42": under_way(Activity.READING, steps=SEEN)}

    shown = words(rendered(timeline_page.PAGE, provider, View(page=TIMELINE)))

    assert "410 ms, ideal n/a; 336 spans of 8 ranks, epoch 0; analysis in progress" in shown


def test_a_step_that_is_being_drawn_has_a_placeholder() -> None:
    provider = training_provider()
    provider.is_drawing = True

    shown = words(rendered(timeline_page.PAGE, provider, View(page=TIMELINE, step=3)))

    assert "Drawing step 3 of run 'demo-42'" in shown


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("running", "no step of run 'demo-42' has been recorded completely yet"),
        ("failed", "run 'demo-42' failed before a step was recorded completely"),
        ("ended", "run 'demo-42' ended before a step was recorded completely"),
        ("lost", "run 'demo-42' fell silent before a step was recorded completely"),
    ],
)
def test_a_run_without_a_step_says_whether_one_may_follow(state: str, said: str) -> None:
    provider = FakeProvider(reports={"demo-42": None}, state=state)

    verdict = words(rendered(overview.PAGE, provider, View(run="demo-42")))
    timeline = words(rendered(timeline_page.PAGE, provider, View(page=TIMELINE)))

    for shown in (verdict, timeline):
        assert f"No data because {said}" in shown
        assert ("If it stays empty while the job trains" in shown) is (state == "running")
