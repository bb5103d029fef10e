from __future__ import annotations

import subprocess
import sys

import pytest

from rankscope.trainer.errors import FaultSpecError
from rankscope.trainer.simulator.fault import (
    CrashKind,
    NetworkReason,
    SimulatedCause,
    SimulatedFault,
    Trace,
    parse_simulated_fault,
    parse_simulated_faults,
)

EVERY_CAUSE = [
    "slow-compute:factor=1.8,rank=5+6,steps=10-29",
    "clock-throttle:factor=1.3,host=2",
    "slow-link:factor=4,src=3,dst=7,steps=2-2",
    "slow-link:factor=4,rank=3",
    "slow-link:factor=4,rack=1",
    "network-degradation:factor=2.5,share=0.25,reason=flap",
    "gc-pause:ms=250,probability=0.01,spans=no",
    "host-stall:ms=2.5,rank=4",
    "data-stall:ms=40,host=1,spans=yes",
    "launch-skew:ms=80,stage=1,tp=3",
    "checkpoint:every=10,ms=2000,spans=yes",
    "stage-imbalance:stage=3,factor=1.2",
    "sequence-imbalance:spread=0.3",
    "misconfiguration:rank=3,variable=NCCL_DEBUG,value=INFO",
    "crash:rank=3,step=12,kind=xid",
    "hang:rank=3,step=12",
]


@pytest.mark.parametrize("spec", EVERY_CAUSE)
def test_a_fault_is_spelled_as_it_was_read(spec: str) -> None:
    assert str(parse_simulated_fault(spec)) == spec


def test_every_cause_has_a_spelling() -> None:
    causes = {fault.cause for fault in parse_simulated_faults(EVERY_CAUSE)}

    assert causes == set(SimulatedCause)


def test_values_are_read_into_their_units() -> None:
    assert parse_simulated_fault("gc-pause:ms=1.5,spans=no,steps=3-4") == SimulatedFault(
        cause=SimulatedCause.GC_PAUSE,
        extra_ns=1_500_000,
        probability=0.005,
        trace=Trace.GAPS,
        steps=(3, 4),
    )
    assert parse_simulated_fault(" network-degradation: factor = 2, reason = retransmit ") == (
        SimulatedFault(
            cause=SimulatedCause.NETWORK_DEGRADATION, factor=2.0, reason=NetworkReason.RETRANSMIT
        )
    )
    assert parse_simulated_fault("crash:rank=0,step=1,kind=host-oom") == SimulatedFault(
        cause=SimulatedCause.CRASH, ranks=(0,), step=1, crash=CrashKind.HOST_OOM
    )


def test_none_and_a_cause_without_keys_are_spellings_too() -> None:
    assert parse_simulated_fault("none") is None
    paused = parse_simulated_fault("gc-pause")
    assert paused is not None
    assert (paused.extra_ns, paused.probability) == (250_000_000, 0.005)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("slow-comput:rank=1,factor=2", "unknown cause 'slow-comput'"),
        ("slow-compute", "expected slow-compute:key=value"),
        ("slow-compute:factor=2", "give either rank=... or host=..."),
        ("slow-compute:factor=2,rank=1,host=0", "give either rank=... or host=..."),
        ("slow-compute:rank=1", "'factor' is missing"),
        ("slow-compute:rank=1,factor=1", "factor must be a number above 1"),
        ("slow-compute:rank=1,factor=2,ms=3", "unknown key 'ms'"),
        ("slow-link:factor=2", "give src=RANK,dst=RANK or rank=RANK"),
        ("slow-link:factor=2,src=1", "give src=RANK,dst=RANK or rank=RANK"),
        ("slow-link:factor=2,rank=1,rack=1", "give src=RANK,dst=RANK or rank=RANK"),
        ("slow-link:factor=2,src=1,dst=1", "src and dst must differ"),
        ("network-degradation:factor=2,share=1.5", "share must be a number above 0 and at most 1"),
        ("network-degradation:factor=2,reason=rain", "reason must be one of congestion"),
        ("gc-pause:spans=maybe", "spans must be one of yes, no"),
        ("host-stall:rank=1,ms=0", "ms must be a number above 0"),
        ("checkpoint:every=0,ms=1", "every must be 1 or more"),
        ("crash:rank=1+2,step=3", "give one rank"),
        ("hang:rank=1", "'step' is missing"),
    ],
)
def test_a_wrong_spec_is_refused_with_what_is_wrong(spec: str, problem: str) -> None:
    with pytest.raises(FaultSpecError) as caught:
        parse_simulated_fault(spec)

    assert problem in str(caught.value)
    assert repr(spec) in str(caught.value)


def test_the_simulator_loads_no_torch() -> None:
    program = (
        "import sys, trainer.simulator.simulation, trainer.simulator.presets,"
        " trainer.simulator.scenario_file; sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
