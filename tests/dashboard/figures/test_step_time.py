from __future__ import annotations

from dataclasses import replace

from rankscope.dashboard.figures.step_time import kind_times_figure, step_time_figure
from rankscope.tracer.span import SpanKind
from tests.support.dashboard.builders import mean_kind_times, report, traces


def test_a_line_breaks_at_missing_steps() -> None:
    sampled = replace(
        report(mfu=False), actual_s_by_step={4: 0.5, 3: 0.4, 9: 0.6}, ideal_s_by_step={}
    )

    figure = step_time_figure(sampled)
    line = traces(figure)[0]

    assert list(line.x) == ["3", "4", "(5-8)", "9"]
    assert list(line.y) == [400, 500, None, 600]
    assert list(line.customdata) == ["400 ms", "500 ms", "n/a", "600 ms"]
    assert list(figure.layout.xaxis.categoryarray) == ["3", "4", "(5-8)", "9"]
    # AND at steps of which only the other quantity is known
    made = report()
    assert made.mfu is not None
    mfu = replace(made.mfu, by_step={0: 0.4, 1: 0.3, 2: 0.4})
    partly = replace(made, actual_s_by_step={0: 1.0, 2: 3.0}, ideal_s_by_step={}, mfu=mfu)
    assert list(traces(step_time_figure(partly))[0].y) == [1.0, None, 3.0]


def test_steps_are_in_order_if_only_the_last_were_analysed() -> None:
    # GIVEN a long run: MFU is known for all steps, the rest for the last two
    made = report()
    assert made.mfu is not None
    mfu = replace(made.mfu, by_step={0: 0.4, 1: 0.3, 2: 0.4, 5: 0.2, 6: 0.2})
    (top, *_) = made.findings
    long = replace(
        made,
        actual_s_by_step={5: 0.8, 6: 0.9},
        ideal_s_by_step={5: 0.4, 6: 0.4},
        mfu=mfu,
        findings=(replace(top, steps=(5, 6)),),
    )

    figure = step_time_figure(long)
    ideal, actual, share = traces(figure)

    # THEN the axis has the steps 0, 1, 2, the missing ones, 5, 6, in this order
    for axis in (figure.layout.xaxis, figure.layout.xaxis2):
        assert axis.categoryorder == "array"
        assert list(axis.categoryarray) == ["0", "1", "2", "(3-4)", "5", "6"]
    assert list(ideal.x) == list(actual.x) == ["5", "6"]
    assert list(share.x) == ["0", "1", "2", "(3-4)", "5", "6"]
    assert list(share.y) == [40, 30, 40, None, 20, 20]
    assert {(shape.x0, shape.x1) for shape in figure.layout.shapes} == {(3.5, 5.5)}


def test_a_line_of_one_step_is_a_point_and_an_unknown_mfu_has_no_line() -> None:
    made = replace(report(mfu=False), actual_s_by_step={3: 1.8}, ideal_s_by_step={3: 1.3})

    lines = {trace.name: trace.mode for trace in traces(step_time_figure(made))}

    assert lines == {"ideal": "lines+markers", "step time": "lines+markers"}


def test_points_of_warm_up_steps_are_hollow_and_no_value_is_smoothed() -> None:
    made = replace(report(), actual_s_by_step={0: 9.0, 1: 1.0, 2: 3.0}, startup_s_by_step={0: 9.0})

    figure = step_time_figure(made)
    line = next(trace for trace in traces(figure) if trace.name == "step time")

    assert list(line.marker.symbol) == ["circle-open", "circle", "circle"]
    assert list(line.y) == [9.0, 1.0, 3.0]


def test_the_shading_covers_the_steps_of_the_finding_on_an_axis_with_missing_steps() -> None:
    known = {3: 0.4, 12: 0.5, 13: 0.5, 29: 0.6}
    sampled = replace(
        report(onset=10, num_steps=30, mfu=False), actual_s_by_step=known, ideal_s_by_step=known
    )

    shaded = step_time_figure(sampled).layout.shapes

    # Places: step 3 is 0, missing 1, step 12 is 2, step 13 is 3, missing 4, step 29 is 5.
    assert {(shape.x0, shape.x1) for shape in shaded} == {(1.5, 5.5)}
    assert not step_time_figure(report(slow_rank=None)).layout.shapes


def test_every_axis_names_its_unit() -> None:
    layout = step_time_figure(report()).layout

    assert layout.xaxis2.title.text == "step"
    assert layout.xaxis.matches == "x2"
    assert layout.yaxis.title.text == "step time (ms)"
    assert layout.yaxis2.title.text == "MFU (%)"
    # AND both panels have the style of figures, with titles beside the labels
    assert layout.yaxis2.gridcolor == layout.yaxis.gridcolor
    assert layout.yaxis2.title.standoff == layout.yaxis.title.standoff > 0


def test_times_by_kind_show_exposed_communication_and_leave_out_nesting_kinds() -> None:
    figure = kind_times_figure("demo-42", mean_kind_times())

    by_name = {line.name: line for line in traces(figure)}

    assert list(by_name) == ["forward", "dp-comm"]
    assert list(by_name["forward"].y) == [240, 250, 245]
    assert list(by_name["dp-comm"].x) == ["3", "4", "5"]
    assert list(by_name["dp-comm"].y) == [30, 10, 12]
    assert by_name["dp-comm"].customdata[0] == ", waiting 20.0 ms"
    assert by_name["dp-comm"].customdata[1] == ""
    assert figure.layout.yaxis.title.text == "time per rank (ms)"


def test_without_closed_steps_the_figure_says_so() -> None:
    figure = kind_times_figure("demo-42", None)

    assert "Not summed up yet" in str(figure.layout.annotations[0].text)


def test_the_step_in_which_a_run_ended_is_on_the_axis_and_shaded() -> None:
    made = report(num_steps=4, slow_rank=None)
    ended = replace(made.top_finding, cause="crash", ranks=(2,), steps=(4, 4))

    figure = step_time_figure(replace(made, findings=(ended,)))

    assert list(figure.layout.xaxis.categoryarray) == ["0", "1", "2", "3", "4"]
    assert figure.layout.xaxis.range == (-0.5, 4.5)
    assert (figure.layout.shapes[0].x0, figure.layout.shapes[0].x1) == (3.5, 4.5)


def test_times_by_kind_fit_the_steps_that_ended_and_mark_the_one_that_never_did() -> None:
    times = mean_kind_times()
    dp_comm = {3: 0.03, 4: 0.01, 5: 60.0}
    hung = replace(times, exposed_s={SpanKind.DP_COMM: dp_comm})

    figure = kind_times_figure("demo-42", hung, open_step=5)
    forward, forward_open, dp, dp_open = traces(figure)

    assert figure.layout.yaxis.title.text == "time per rank (ms)"
    assert (list(forward.y), list(dp.y)) == ([240, 250], [30, 10])
    # 8 % above the longest time of a step that ended.
    assert (dp_open.x, dp_open.y, dp_open.marker.symbol) == (("5",), (270.0,), ("triangle-up",))
    assert dp_open.customdata == ("60.0 s",)
    assert (forward_open.y, forward_open.marker.symbol) == ((245.0,), ("circle-open",))
    assert (figure.layout.shapes[0].x0, figure.layout.shapes[0].x1) == (1.5, 2.5)
    # AND are as they are if no step ever ended
    figure = kind_times_figure("demo-42", mean_kind_times(), open_step=3)
    assert [list(line.y) for line in traces(figure)] == [[240, 250, 245], [30, 10, 12]]


def test_marks_of_kinds_beyond_the_axis_do_not_hide_each_other() -> None:
    times = mean_kind_times()
    busy = {**times.busy_s, SpanKind.FORWARD: {3: 0.24, 4: 0.25, 5: 60.0}}
    hung = replace(times, busy_s=busy, exposed_s={SpanKind.DP_COMM: {3: 0.03, 4: 0.01, 5: 60.0}})

    figure = kind_times_figure("demo-42", hung, open_step=5)

    assert [line.y for line in traces(figure) if line.mode == "markers"] == [(270.0,), (290.0,)]

    # AND many of them do not stretch the axis
    kinds = (SpanKind.OPTIMIZER, SpanKind.DATA, SpanKind.GC)
    hung = replace(hung, busy_s={**busy, **{kind: {3: 0.01, 4: 0.01, 5: 60.0} for kind in kinds}})
    figure = kind_times_figure("demo-42", hung, open_step=5)
    marks = [line.y[0] for line in traces(figure) if line.mode == "markers"]
    assert marks == [260.0, 270.0, 280.0, 290.0, 300.0]
