from __future__ import annotations

from dataclasses import replace

from rankscope.analysis.breakdown.run_history import StepMark, summarize_history
from rankscope.dashboard.figures.run_axis import STRIP_HEIGHT, run_axis_figure
from rankscope.dashboard.figures.timeline_canvas import PALE
from rankscope.tracer.span import NS_PER_S
from tests.support.dashboard.builders import report


def test_every_step_has_a_column_and_what_happened_a_lane() -> None:
    made = replace(report(num_steps=30, onset=10), planned_steps=(20,))
    marks = [
        StepMark(epoch=epoch, step=step, begin_ns=step, end_ns=step + 1, loss=None)
        for epoch, steps in ((0, range(15)), (1, range(12, 30)))
        for step in steps
    ]
    top = made.top_finding

    figure = run_axis_figure(made, summarize_history(marks), step=3, links={top: "?step=9"})

    columns, mfu, *lanes = figure["data"]
    assert columns["x"] == list(range(30))
    assert mfu["yaxis"] == "y3"
    named = dict(zip(figure["layout"]["yaxis2"]["ticktext"], lanes, strict=True))
    assert named[top.cause]["x"] == list(top.steps or ())
    assert named[top.cause]["customdata"] == ["?step=9"] * 2
    assert named["pauses"]["x"] == [20]
    assert named["restarts"]["x"] == [12]
    assert figure["layout"]["shapes"][0]["x0"] == 2.5


def test_steps_that_were_not_analysed_have_pale_columns_of_their_recorded_time() -> None:
    made = report(num_steps=30, onset=10)
    analysed = {step: made.actual_s_by_step[step] for step in (28, 29)}
    marks = [
        StepMark(epoch=0, step=at, begin_ns=at * NS_PER_S, end_ns=(at + 1) * NS_PER_S, loss=None)
        for at in range(30)
    ]

    figure = run_axis_figure(
        replace(made, actual_s_by_step=analysed), summarize_history(marks), step=3, links={}
    )

    columns = figure["data"][0]
    assert (columns["x"], columns["y"][:28]) == (list(range(30)), [1.0] * 28)
    assert columns["y"][28:] == list(analysed.values())
    assert columns["marker"]["opacity"] == [PALE] * 28 + [1, 1]


def test_the_strip_is_as_high_with_many_lanes_as_with_none() -> None:
    made = report(num_steps=30, onset=10)
    calm = replace(made, findings=(), planned_steps=())

    heights = {
        run_axis_figure(one, None, step=3, links={})["layout"]["height"] for one in (made, calm)
    }

    assert heights == {STRIP_HEIGHT}
