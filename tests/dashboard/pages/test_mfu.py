"""The page of a run's MFU."""

from __future__ import annotations

from dataclasses import replace

from rankscope.analysis.breakdown.run_history import StepMark, summarize_history
from rankscope.analysis.breakdown.waterfall import PARTS
from rankscope.analysis.breakdown.waterfall_views import WaterfallBy, list_rows
from rankscope.analysis.report.memory import MemoryUse, ModelState, StageMemory
from rankscope.analysis.report.network import CommonPause
from rankscope.analysis.report.report import Mfu, PipelineBubble, RunReport
from rankscope.dashboard.address import MFU, View
from rankscope.dashboard.figures.waterfall import mfu_figure, waterfall_figure
from rankscope.dashboard.pages.mfu import show_mfu
from rankscope.dashboard.theme import PART_COLORS
from tests.support.dashboard.analysed import analysed_report
from tests.support.dashboard.builders import FakeProvider, report, traces
from tests.support.dashboard.page_text import words

KNOWN = Mfu(
    convention="6 N per token",
    mean=0.3,
    by_step=dict.fromkeys(range(8), 0.3),
    restart_steps=(4,),
)
PAST = summarize_history(
    [
        StepMark(epoch=0, step=step, begin_ns=10 * step, end_ns=10 * step + 8, loss=2.5)
        for step in range(8)
    ]
)


def text_of(made: RunReport, *, show: str | None = None) -> str:
    view = View(page=MFU, run=made.run, show=show)
    return words(show_mfu(FakeProvider(past=PAST), made, view))


def test_the_page_shows_parts_in_time_and_points_and_the_bubble_beside_its_formula() -> None:
    made = replace(analysed_report(), mfu=KNOWN)
    assert made.waterfall is not None
    bubble = PipelineBubble(
        num_stages=2, num_chunks=1, num_microbatches=4, formula_ratio=0.25, measured_ratio=0.3
    )
    made = replace(made, waterfall=replace(made.waterfall, bubble=bubble))

    text = text_of(made)

    assert "30.0 % mean of 8 steps: 6 N per token" in text
    assert "30.0 % of useful compute as measured, 25.0 % by its formula" in text
    assert "by | step | stage | DP position | TP position | rank" in text


def test_the_parts_of_a_long_run_say_which_steps_they_cover() -> None:
    whole = replace(analysed_report(), mfu=KNOWN)
    part = replace(whole, steps=whole.steps[-1:], num_earlier_steps=3)

    assert "Covers only" not in text_of(whole)
    assert "Covers only the last step of 4. Mean step of the mean rank" in text_of(part)


def test_an_unknown_mfu_and_an_unknown_waterfall_are_named() -> None:
    made = report(mfu=False)

    text = text_of(made)

    assert "MFU n/a: peak of A100 at bfloat16 unknown" in text
    assert "No step could be replayed" in text


def test_the_curve_marks_pauses_and_restarts() -> None:
    pauses = (CommonPause(step=3, name="checkpoint", seconds=1.5),)
    made = replace(analysed_report(), mfu=KNOWN, common_pauses=pauses)

    figure = mfu_figure(made, PAST)

    assert [(one.name, one.x) for one in traces(figure)] == [
        ("MFU (%)", tuple(range(8))),
        ("loss", tuple(range(8))),
        ("checkpoint", (3,)),
    ]
    texts = [one.text for one in figure.layout.annotations]
    assert "restart 4" in texts
    assert made.top_finding.cause in texts


def test_the_axis_ends_with_the_step_that_hangs_and_its_label_is_within() -> None:
    made = replace(analysed_report(), mfu=KNOWN)
    hang = replace(made.top_finding, cause="hang", steps=(8, 8))

    figure = mfu_figure(replace(made, findings=(hang,)), PAST)

    assert tuple(figure.layout.xaxis.range) == (-0.5, 8.5)
    (label,) = [one for one in figure.layout.annotations if one.text == "hang"]
    assert (label.x, label.xanchor) == (8.5, "right")


def test_the_stacked_parts_are_those_that_take_time() -> None:
    rows = list_rows(analysed_report(), WaterfallBy.RANK)
    assert rows is not None

    bars = traces(waterfall_figure(rows, run="tiny"))

    assert set(PART_COLORS) == {part.value for part in PARTS}
    assert len(bars) == int((rows.seconds.sum(axis=0) > 0).sum())


def test_the_page_shows_the_memory_of_each_stage_and_what_it_consists_of() -> None:
    stage = StageMemory(
        stage=1,
        rank=6,
        peak_allocated_bytes=60 << 30,
        peak_reserved_bytes=77 << 30,
        capacity_bytes=78 << 30,
        device_bytes=80 << 30,
        num_alloc_retries=0,
        state=ModelState(parameter_bytes=1 << 30, gradient_bytes=2 << 30, optimizer_bytes=6 << 30),
        activation_bytes=20 << 30,
    )
    whole = ModelState(parameter_bytes=7e11, gradient_bytes=7e11, optimizer_bytes=1.4e12)
    use = MemoryUse(stages=(stage,), whole=whole, missing_activations="")

    text = text_of(replace(analysed_report(), memory=use))

    row = "1 | 6 | 60.0 GiB | 77 % | 77.0 GiB | 80.0 GiB | 1.00 GiB | 2.00 GiB | 6.00 GiB"
    assert f"{row} | 20.0 GiB | 31.0 GiB" in text
    assert "700 GB parameters + 700 GB gradients + 1,400 GB optimizer" in text
    assert "Memory" not in text_of(analysed_report())


def test_activations_without_a_formula_are_named() -> None:
    stage = StageMemory(
        stage=0,
        rank=0,
        peak_allocated_bytes=60 << 30,
        peak_reserved_bytes=None,
        capacity_bytes=None,
        device_bytes=None,
        num_alloc_retries=None,
        state=None,
        activation_bytes=None,
    )
    use = MemoryUse(stages=(stage,), whole=None, missing_activations="of this architecture")

    text = text_of(replace(analysed_report(), memory=use))

    assert "Activations n/a of this architecture." in text
    assert "0 | 0 | 60.0 GiB | n/a | n/a" in text


def test_the_mean_has_the_hfu_beside_it_if_layers_are_recomputed() -> None:
    text = text_of(replace(analysed_report(), mfu=replace(KNOWN, hfu=0.4)))

    assert "30.0 %, HFU 40.0 % mean of 8 steps" in text
