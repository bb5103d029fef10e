"""Named scenarios: a healthy cluster, and one for each cause."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ScenarioError
from ..faults.spec import Fault, FaultCause, parse_simulated_faults
from .placement import place
from .scenario import Noise, RankOrder, Scenario, TpDetail
from .schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HEALTHY = "healthy"
BASE: dict[str, Any] = {"dp": 4, "pp": 2, "tp": 2, "tp_detail": TpDetail.COARSE, "num_steps": 24}
MICROBATCHES_PER_STAGE = 4
"""Keeps the pipeline bubble below a quarter of the step."""

SMALL_HOST, FULL_HOST = 4, 8
"""Ranks per host: few, so that a small job has several hosts, unless TP needs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named scenario."""

    title: str
    """What the scenario shows, in a few words."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from `BASE`."""

    faults: Callable[[Scenario], tuple[str, ...]] = lambda _: ()
    """Returns the texts of the faults for a scenario of any size."""


def preset_settings(name: str, **settings: Any) -> dict[str, Any]:  # noqa: ANN401  # likewise
    """Return the fields of `Scenario` of a named scenario with these settings.

    Raises:
        ScenarioError: There is no such preset.
    """
    if name not in PRESETS:
        raise ScenarioError(
            f"no scenario {name!r}: use a .toml or .json file, or one of {', '.join(PRESETS)}"
        )
    chosen = BASE | dict(PRESETS[name].settings) | settings
    fitting = {
        "num_microbatches": MICROBATCHES_PER_STAGE * chosen["pp"],
        "ranks_per_host": SMALL_HOST if chosen["tp"] <= SMALL_HOST else FULL_HOST,
    }
    return fitting | chosen


def preset_faults(name: str, scenario: Scenario) -> tuple[Fault, ...]:
    """Return the faults of a named scenario for the sizes of ``scenario``.

    Raises:
        FaultSpecError: The scenario is too small for the fault.
    """
    return parse_simulated_faults(PRESETS[name].faults(scenario))


def _neighbours(scenario: Scenario) -> tuple[int, int]:
    """Return two neighbours of a data-parallel ring, or of a pipeline if dp is 1."""
    grid = place(scenario).rank
    if scenario.dp > 1:
        ring = np.sort(grid[0, :, :, 0].ravel())
        middle = len(ring) // 2
        return int(ring[middle - 1]), int(ring[middle])
    return int(grid[0, 0, 0, 0]), int(grid[min(1, scenario.pp - 1), 0, 0, 0])


def _at(text: str) -> Callable[[Scenario], tuple[str, ...]]:
    """Return a function that replaces the words in capitals by values of a scenario."""

    def faults(scenario: Scenario) -> tuple[str, ...]:
        src, dst = _neighbours(scenario)
        words = {
            "RANK": str(min(scenario.world_size // 2 + 1, scenario.world_size - 1)),
            "STEPS": f"steps={scenario.num_steps // 3}-{scenario.num_steps - 1}",
            "MIDDLE": str(scenario.num_steps // 2),
            "LINK": f"src={src},dst={dst}",
            "LAST": str(scenario.pp - 1),
        }
        filled = text
        for word, value in words.items():
            filled = filled.replace(word, value)
        return (filled,)

    return faults


PRESETS: dict[str, Preset] = {
    HEALTHY: Preset(title="healthy"),
    "noisy": Preset(
        title="healthy: sequence lengths vary, links are noisy, compute drifts",
        settings={"noise": Noise(sequence_spread=0.1, transfer_jitter_ratio=0.1, drift_ratio=0.02)},
    ),
    **{
        cause.value: Preset(title=title, faults=_at(f"{cause.value}:{text}"))
        for cause, title, text in (
            (FaultCause.SLOW_COMPUTE, "one slow rank", "rank=RANK,factor=1.5,STEPS"),
            (
                FaultCause.CLOCK_THROTTLE,
                "one device runs hot",
                "rank=RANK,factor=1.3,STEPS",
            ),
            (FaultCause.SLOW_LINK, "one slow link", "LINK,factor=10,STEPS"),
            (
                FaultCause.NETWORK_DEGRADATION,
                "a congested network",
                "factor=3,reason=congestion,STEPS",
            ),
            (FaultCause.GC_PAUSE, "garbage collections", "ms=250,probability=0.02"),
            (FaultCause.HOST_STALL, "one rank launches late", "rank=RANK,ms=5,STEPS"),
            (FaultCause.DATA_STALL, "one rank waits for data", "rank=RANK,ms=200,STEPS"),
            (FaultCause.LAUNCH_SKEW, "ranks launch a collective late, in turn", "ms=200,stage=0"),
            (FaultCause.CHECKPOINT, "a checkpoint every few steps", "every=8,ms=2000"),
            (FaultCause.STAGE_IMBALANCE, "a slow last stage", "stage=LAST,factor=1.4"),
            (FaultCause.SEQUENCE_IMBALANCE, "very unequal sequence lengths", "spread=0.3"),
            (FaultCause.MISCONFIGURATION, "one variable differs", "rank=RANK"),
            (
                FaultCause.CRASH,
                "one rank runs out of memory",
                "rank=RANK,step=MIDDLE,kind=cuda-oom",
            ),
            (FaultCause.HANG, "one rank hangs", "rank=RANK,step=MIDDLE"),
            (
                FaultCause.MISMATCH,
                "one rank calls a collective that the others do not call",
                "rank=RANK,step=MIDDLE",
            ),
            (FaultCause.RECOMPILE, "one rank recompiles", "rank=RANK,ms=300,every=3,STEPS"),
            (FaultCause.EVALUATION, "rank 0 evaluates, the others wait", "every=8,ms=2000"),
            (
                FaultCause.CPU_HOG,
                "other processes on the cores of one rank",
                "rank=RANK,factor=3,STEPS",
            ),
        )
    },
    FaultCause.MEMORY_HOG.value: Preset(
        title="a loader is slow, because other processes copy memory",
        settings={"data_ms": 30.0},
        faults=_at("memory-hog:rank=RANK,factor=5,STEPS"),
    ),
    "zero-bubble": Preset(
        title="healthy: a pipeline with a split backward",
        settings={"pp": 4, "schedule": Schedule.ZERO_BUBBLE},
    ),
    "experts": Preset(
        title="healthy: experts with unequal numbers of tokens",
        settings={"ep": 4, "noise": Noise(expert_spread=0.2)},
    ),
    "tp-across-hosts": Preset(
        title="tensor parallelism across hosts",
        settings={"rank_order": RankOrder.DP_FIRST},
    ),
    "few-microbatches": Preset(
        title="too few micro-batches for the stages",
        settings={"pp": 4, "num_microbatches": 4},
    ),
}
"""All named scenarios."""
