"""Builders of small scenarios, and their recorded tables as numpy columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.presets import preset_faults, preset_settings
from rankscope.trainer.simulator.scenario import Network, Noise, Scenario
from rankscope.trainer.simulator.simulation import Simulation, simulate

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

MS = 1_000_000
EXACT = Noise(
    rank_bias_ratio=0.0,
    compute_jitter_ratio=0.0,
    transfer_jitter_ratio=0.0,
    end_jitter_ns=0,
    launch_gap_ns=0,
    clock_error_ns=0,
)
"""No noise, so that expected times are easy to compute."""

FREE = Network(host_latency_ns=0, rack_latency_ns=0, spine_latency_ns=0)
"""A network without latency."""

NO_BYTES: dict[str, Any] = {
    "activation_bytes": 0,
    "tp_bytes": 0,
    "ep_bytes": 0,
    "gradient_bytes": 0,
}


def exact(*faults: str, **settings: Any) -> Scenario:  # noqa: ANN401
    """Return a scenario in which only compute takes time: no noise, latency, bytes or data."""
    plain = {"noise": EXACT, "network": FREE, "data_ms": 0.0, **NO_BYTES}
    return Scenario(**(plain | settings), faults=parse_simulated_faults(faults))


@dataclass(frozen=True)
class Columns:
    """One table over all steps, whose rows are selected by conditions."""

    values: dict[str, NDArray[Any]]

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.values[name]

    def __len__(self) -> int:
        return len(self.values["run_id"])

    def where(self, **wanted: object) -> Columns:
        keep = np.ones(len(self), dtype=np.bool_)
        for name, value in wanted.items():
            keep &= self.values[name] == value
        return self.rows(keep)

    def rows(self, keep: NDArray[np.bool_]) -> Columns:
        return Columns({name: values[keep] for name, values in self.values.items()})

    @property
    def end_ns(self) -> NDArray[np.int64]:
        ends: NDArray[np.int64] = self["start_ns"] + self["duration_ns"]
        return ends


@dataclass(frozen=True)
class Recorded:
    """All tables of a simulation."""

    simulation: Simulation
    spans: Columns
    steps: Columns
    microbatches: Columns
    samples: Columns
    events: Columns

    def step_ms(self, step: int) -> float:
        """Return how long a step took, from the first rank's start to the last one's end."""
        rows = self.steps.where(step=step)
        return float(rows["end_ns"].max() - rows["start_ns"].min()) / MS


def record(scenario: Scenario) -> Recorded:
    simulation = simulate(scenario)
    tables = list(simulation.tables())
    names = ("spans", "steps", "microbatches", "samples", "events")
    return Recorded(
        simulation, **{name: _columns([getattr(one, name) for one in tables]) for name in names}
    )


def _columns(tables: list[pa.Table]) -> Columns:
    lists = [table.to_pydict() for table in tables]
    return Columns(
        {
            name: np.array(
                [value for columns in lists for value in columns[name]],
                dtype=np.uint64 if name == "group_id" else None,  # numpy would convert to float
            )
            for name in lists[0]
        }
    )


def preset_scenario(name: str, **settings: Any) -> Scenario:  # noqa: ANN401
    """Return a scenario of `PRESETS`; ``settings`` replace its fields, except ``faults``."""
    scenario = Scenario(**preset_settings(name, **settings))
    return replace(scenario, faults=preset_faults(name, scenario))
