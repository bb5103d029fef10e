from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.tracer.topology import Layout
from rankscope.trainer.config import TrainerConfig
from rankscope.trainer.errors import FaultSpecError
from rankscope.trainer.faults.spec import (
    SIMULATED_FAULTS,
    CrashKind,
    Fault,
    FaultCause,
    NetworkReason,
    parse_fault,
    parse_faults,
    slowdown_of,
)

CUBE = Layout(pp=2, dp=2, tp=2)


EVERY_KIND = (
    "slow-compute:rank=5,factor=1.8,steps=10-29",
    "clock-throttle:rank=5,factor=1.3,steps=3-9",
    "stage-imbalance:stage=1,factor=1.5",
    "clock-throttle:rank=5,factor=1.8,ramp=4",
    "data-stall:rank=5,ms=200,every=4,spans=yes",
    "slow-link:src=4,dst=5,factor=50,probability=0.3",
    "host-stall:rank=6,ms=40,steps=2-5",
    "data-stall:ms=300",
    "data-stall:ms=300,rank=1,spans=no,steps=4-9",
    "gc-pause:ms=150,probability=0.1,spans=no,steps=1-8",
    "launch-skew:ms=500,stage=1,tp=1,steps=0-9",
    "checkpoint:every=4,ms=800,spans=no,steps=0-15",
    "sequence-imbalance:spread=0.3,steps=0-7",
    "slow-link:factor=40,src=4,dst=5,steps=3-7",
    "slow-link:factor=40,rank=4",
    "misconfiguration:rank=3,variable=NCCL_ALGO,value=Tree",
    "crash:rank=2,step=4,kind=host-oom",
    "hang:rank=2,step=4",
    "mismatch:rank=2,step=4",
    "recompile:rank=2,ms=300,every=3,steps=4-9",
    "recompile:ms=300",
    "evaluation:every=5,ms=800,rank=1",
    "cpu-hog:rank=2,factor=3,steps=4-9",
    "memory-hog:rank=2,factor=3",
)


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_every_cause_is_read_and_printed(spec: str) -> None:
    fault = parse_fault(spec)

    assert fault is not None
    assert parse_fault(str(fault)) == fault
    assert parse_fault(spec, SIMULATED_FAULTS) == fault
    assert set(spec.partition(":")[2].split(",")) <= set(str(fault).partition(":")[2].split(","))


SIMULATED = (
    "slow-compute:rank=5+6,factor=1.8,steps=10-29",
    "clock-throttle:host=2,factor=1.3",
    "slow-link:src=3,dst=7,factor=4,steps=2-2",
    "slow-link:rank=3,factor=4",
    "slow-link:rack=1,factor=4",
    "network-degradation:factor=2.5,share=0.25,reason=flap",
    "gc-pause:ms=250,probability=0.01,spans=no",
    "host-stall:rank=4,ms=2.5",
    "data-stall:host=1,ms=40,spans=yes",
    "launch-skew:ms=80,stage=1,tp=3",
    "checkpoint:every=10,ms=2000,spans=yes",
    "stage-imbalance:stage=3,factor=1.2",
    "sequence-imbalance:spread=0.3",
    "misconfiguration:rank=3,variable=NCCL_DEBUG,value=INFO",
    "crash:rank=3,step=12,kind=xid",
    "hang:rank=3,step=12",
    "mismatch:rank=3,step=12",
    "recompile:host=1,ms=300",
    "evaluation:every=10,ms=2000,rank=0",
    "cpu-hog:host=1,factor=3",
    "memory-hog:rank=3,factor=2.5,steps=3-9",
)


@pytest.mark.parametrize("spec", SIMULATED)
def test_a_simulated_fault_is_printed_as_it_was_read(spec: str) -> None:
    assert str(parse_fault(spec, SIMULATED_FAULTS)) == spec


@pytest.mark.parametrize(
    ("special", "spec"),
    [
        ("network-jitter:rank=4,factor=40", "slow-link:rank=4,factor=40,probability=0.3"),
        ("throttle-ramp:rank=5,factor=1.8", "clock-throttle:rank=5,factor=1.8,ramp=10"),
        ("slow-loader-worker:rank=1,ms=900", "data-stall:rank=1,ms=900,every=4"),
        ("slow-loader-worker:ms=900,every=2", "data-stall:ms=900,every=2"),
    ],
)
def test_a_special_form_is_a_cause_with_other_defaults(special: str, spec: str) -> None:
    assert parse_fault(special) == parse_fault(spec) == parse_fault(special, SIMULATED_FAULTS)


def test_an_evaluation_follows_every_so_many_steps() -> None:
    fault = parse_fault("evaluation:every=3,ms=10,steps=2-8")

    assert fault is not None
    assert fault.ranks == (0,)
    assert [step for step in range(12) if fault.is_active(step)] == [2, 5, 8]


def test_a_rank_alone_cannot_call_a_collective_that_others_do_not() -> None:
    with pytest.raises(FaultSpecError, match="several ranks"):
        TrainerConfig(
            world_size=1, num_microbatches=1, faults=parse_faults(["mismatch:rank=0,step=1"])
        )


def test_the_simulator_has_every_cause() -> None:
    causes = {fault.cause for fault in parse_faults(SIMULATED, SIMULATED_FAULTS)}

    assert causes == set(FaultCause)


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        (
            "slow-compute:rank=5,factor=1.8,steps=10-29",
            Fault(cause=FaultCause.SLOW_COMPUTE, factor=1.8, ranks=(5,), steps=(10, 29)),
        ),
        (
            "slow-compute:factor=2,rank=6+5",
            Fault(cause=FaultCause.SLOW_COMPUTE, factor=2.0, ranks=(5, 6)),
        ),
        (
            " stage-imbalance: stage = 1, factor = 1.5, steps=7 ",
            Fault(cause=FaultCause.STAGE_IMBALANCE, factor=1.5, stage=1, steps=(7, 7)),
        ),
        (
            "gc-pause:ms=1.5,spans=no,steps=3-4",
            Fault(
                cause=FaultCause.GC_PAUSE,
                extra_ns=1_500_000,
                probability=0.005,
                has_spans=False,
                steps=(3, 4),
            ),
        ),
        (
            " network-degradation: factor = 2, reason = retransmit ",
            Fault(
                cause=FaultCause.NETWORK_DEGRADATION, factor=2.0, reason=NetworkReason.RETRANSMIT
            ),
        ),
        (
            "crash:rank=0,step=1,kind=host-oom",
            Fault(cause=FaultCause.CRASH, ranks=(0,), step=1, crash_kind=CrashKind.HOST_OOM),
        ),
    ],
)
def test_values_are_read_into_their_units(spec: str, fault: Fault) -> None:
    assert parse_fault(spec, SIMULATED_FAULTS) == fault


def test_keys_that_are_left_out_have_defaults() -> None:
    pause, setting = parse_fault("gc-pause"), parse_fault("misconfiguration:rank=1")

    assert pause is not None
    assert (pause.extra_ns, pause.probability, pause.has_spans) == (250_000_000, 0.005, True)
    assert setting is not None
    assert (setting.variable, setting.value) == ("NCCL_IB_DISABLE", "1")


def test_none_is_no_fault() -> None:
    assert parse_fault("none") is None
    assert parse_faults(["none", "slow-compute:rank=0,factor=3", "none"]) == (
        Fault(cause=FaultCause.SLOW_COMPUTE, factor=3.0, ranks=(0,)),
    )


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("", "unknown cause ''"),
        ("slow:rank=1,factor=2", "unknown cause 'slow'"),
        ("slow-compute", "expected slow-compute:key=value"),
        ("slow-compute:", "expected key=value, got ''"),
        ("slow-compute:rank", "expected key=value, got 'rank'"),
        ("slow-compute:rank=,factor=2", "expected key=value, got 'rank='"),
        ("slow-compute:ranks=1,factor=2", "unknown key 'ranks'"),
        ("slow-compute:stage=1,factor=2", "unknown key 'stage'"),
        ("slow-compute:rank=1,rank=2,factor=2", "'rank' is given twice"),
        ("slow-compute:rank=1", "'factor' is missing"),
        ("slow-compute:factor=2", "give rank=RANK"),
        ("slow-compute:rank=-1,factor=2", "rank must be a whole number from 0 on, got '-1'"),
        ("slow-compute:rank=1+1,factor=2", "rank names a rank twice"),
        ("slow-compute:rank=1+,factor=2", "rank must be a whole number from 0 on, got ''"),
        ("slow-compute:rank=1,factor=1", "factor must be a number above 1, got '1'"),
        ("slow-compute:rank=1,factor=0.5", "factor must be a number above 1"),
        ("slow-compute:rank=1,factor=nan", "factor must be a number above 1"),
        ("slow-compute:rank=1,factor=inf", "factor must be a number above 1"),
        ("slow-compute:rank=1,factor=two", "factor must be a number above 1"),
        ("slow-compute:rank=1,factor=2,steps=9-5", "it ends before it starts"),
        ("host-stall:rank=1,ms=0", "ms must be a number above 0, got '0'"),
        ("gc-pause:probability=1.5", "probability must be a number above 0 and at most 1"),
        ("checkpoint:every=0,ms=5", "every must be a whole number from 1 on"),
        ("data-stall:ms=5,spans=maybe", "spans must be one of yes, no, got 'maybe'"),
        ("crash:rank=1,step=2,kind=xid", "kind must be one of exception, host-oom, exit, kill"),
        ("crash:rank=1+2,step=2", "give one rank"),
        ("slow-link:factor=5", "give src=RANK,dst=RANK or rank=RANK"),
        ("slow-link:factor=5,src=1", "give src=RANK,dst=RANK or rank=RANK"),
        ("slow-link:factor=5,src=1,dst=1", "src and dst must differ"),
        ("network-degradation:factor=2", "unknown cause 'network-degradation'"),
        ("slow-compute:rank=1,factor=2,steps=5-", "steps must be a whole number"),
        ("slow-compute:rank=1,factor=2,steps=a-b", "steps must be a whole number"),
    ],
)
def test_an_invalid_fault_is_refused_with_the_problem(spec: str, problem: str) -> None:
    with pytest.raises(FaultSpecError) as caught:
        parse_fault(spec)

    assert problem in str(caught.value)
    assert str(caught.value).startswith(f"fault {spec!r}: ")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("slow-compute:factor=2", "give rank=RANK or host=HOST"),
        ("slow-compute:factor=2,rank=1,host=0", "give rank=RANK or host=HOST"),
        ("data-stall:ms=2,rank=1,host=0", "give rank=RANK or host=HOST"),
        ("slow-link:factor=2", "give src=RANK,dst=RANK or rank=RANK or rack=RACK"),
        ("slow-link:factor=2,rank=1,rack=1", "give src=RANK,dst=RANK or rank=RANK or rack=RACK"),
        ("network-degradation:factor=2,share=1.5", "share must be a number above 0 and at most 1"),
        ("network-degradation:factor=2,reason=rain", "reason must be one of congestion"),
        ("crash:rank=1,step=2,kind=kill", "kind must be one of cuda-oom, host-oom, xid, exception"),
        ("hang:rank=1", "'step' is missing"),
    ],
)
def test_an_invalid_simulated_fault_is_refused_with_the_problem(spec: str, problem: str) -> None:
    with pytest.raises(FaultSpecError) as caught:
        parse_fault(spec, SIMULATED_FAULTS)

    assert problem in str(caught.value)
    assert repr(spec) in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("slow-compute:rank=8,factor=2", "rank 8 does not exist: the layout has ranks 0 to 7"),
        ("stage-imbalance:stage=2,factor=2", "stage 2 does not exist: --pp 2 has stages 0 to 1"),
        ("launch-skew:ms=5,tp=2", "tp 2 does not exist: the layout has tps 0 to 1"),
        ("slow-link:factor=2,src=0,dst=9", "rank 9 does not exist"),
        ("slow-link:factor=2,src=0,dst=7", "ranks 0 and 7 exchange no data"),
    ],
)
def test_a_place_outside_the_layout_is_refused(spec: str, problem: str) -> None:
    fault = parse_fault(spec)
    assert fault is not None

    with pytest.raises(FaultSpecError, match=problem):
        fault.culprits(CUBE)


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        ("stage-imbalance:stage=1,factor=1.5", (4, 5, 6, 7)),
        ("launch-skew:ms=5,stage=1,tp=1", (5, 7)),
        ("launch-skew:ms=5", (0, 2)),
        ("slow-link:factor=2,src=5,dst=1", (1, 5)),
        ("data-stall:ms=5", tuple(range(8))),
        ("data-stall:ms=5,rank=3", (3,)),
        ("checkpoint:every=2,ms=5", tuple(range(8))),
    ],
)
def test_each_fault_has_its_ranks(spec: str, ranks: tuple[int, ...]) -> None:
    fault = parse_fault(spec)

    assert fault is not None
    assert fault.culprits(CUBE) == ranks


def test_launch_skew_needs_a_group_of_several_ranks() -> None:
    (fault,) = parse_faults(["launch-skew:ms=5"])

    with pytest.raises(FaultSpecError, match="pass --dp 2 or more"):
        fault.culprits(Layout(pp=4, tp=2))


def test_only_compute_faults_slow_compute() -> None:
    faults = parse_faults(["host-stall:rank=1,ms=5", "clock-throttle:rank=1,factor=1.5"])

    assert slowdown_of(faults, CUBE, rank=1, step=0) == 1.5


def test_a_fault_slows_its_rank_in_its_steps_only() -> None:
    faults = parse_faults(["slow-compute:rank=5,factor=1.8,steps=10-29"])

    def slowdowns(rank: int) -> list[float]:
        return [slowdown_of(faults, CUBE, rank=rank, step=step) for step in (9, 10, 29, 30)]

    assert slowdowns(5) == [1.0, 1.8, 1.8, 1.0]
    assert slowdowns(4) == [1.0, 1.0, 1.0, 1.0]


def test_a_ramp_reaches_its_factor_in_equal_steps() -> None:
    faults = parse_faults(["clock-throttle:rank=5,factor=1.8,ramp=4,steps=10-29"])

    slowdowns = [slowdown_of(faults, CUBE, rank=5, step=step) for step in (9, 10, 11, 13, 29, 30)]

    assert slowdowns == pytest.approx([1.0, 1.2, 1.4, 1.8, 1.8, 1.0])


def test_a_slow_loader_worker_is_late_in_its_own_steps() -> None:
    (fault,) = parse_faults(["data-stall:ms=50,every=4,steps=3-11"])

    assert [step for step in range(20) if fault.is_active(step)] == [3, 7, 11]


def test_factors_of_several_faults_on_a_rank_multiply() -> None:
    faults = parse_faults(["slow-compute:rank=5,factor=2", "stage-imbalance:stage=1,factor=1.5"])

    slowdowns = [slowdown_of(faults, CUBE, rank=rank, step=0) for rank in range(8)]

    assert slowdowns == [1.0, 1.0, 1.0, 1.0, 1.5, 3.0, 1.5, 1.5]


@given(
    ranks=st.sets(st.integers(0, 10**6), min_size=1, max_size=4),
    factor=st.integers(101, 9999).map(lambda hundredths: hundredths / 100),
    first=st.none() | st.integers(0, 10**6),
    length=st.integers(0, 1000),
)
def test_a_printed_fault_can_be_parsed(
    ranks: set[int], factor: float, first: int | None, length: int
) -> None:
    fault = Fault(
        cause=FaultCause.SLOW_COMPUTE,
        factor=factor,
        ranks=tuple(sorted(ranks)),
        steps=None if first is None else (first, first + length),
    )

    assert parse_fault(str(fault)) == fault


PIECES = (
    *("slow-compute", "stage-imbalance", "none", ":", "=", ",", "+", "-", "rank", "stage"),
    *("factor", "steps", "0", "1.5", "7", "²", "٣", "e", " ", "rank=1,", "factor=2,"),
)


@given(st.text() | st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_text_is_a_fault_or_is_refused_and_quoted(text: str) -> None:
    try:
        fault = parse_fault(text)
    except FaultSpecError as problem:
        refused = problem.spec
    else:
        refused = text
        assert fault is None or (fault.factor > 1 and fault == parse_fault(str(fault)))

    assert refused == text


def test_faults_and_configuration_are_read_without_torch() -> None:
    program = (
        "import sys; from rankscope.trainer import config;"
        " from rankscope.trainer.faults import spec; print('torch' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == "False\n"
