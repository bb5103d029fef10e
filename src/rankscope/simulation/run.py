"""`rankscope simulate`: run a synthetic cluster with planted faults, and keep what it recorded."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.analysis.report.text import format_ranks
from rankscope.collector.client.served_store import open_for_reading
from rankscope.collector.identity import checked_run_name
from rankscope.collector.store.location import default_store_url
from rankscope.tracer.span import NS_PER_MS

from ..errors import BadInputError
from ..terminal.lines import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankscope.trainer.simulator.scenario import Scenario
    from rankscope.trainer.simulator.simulation import Simulation
    from rankscope.trainer.simulator.tables import StepTables
    from rankscope.trainer.simulator.truth import Truth

    from .store import Simulated

MAX_NAMED_RANKS = 8
"""More are counted, not listed."""

PROGRESS_EVERY = 10
SCENARIO_SUFFIXES = (".toml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What to simulate and where to; None: as the scenario says."""

    scenario: str
    """Name of a preset, or path of a TOML or JSON file."""

    run_id: str
    num_ranks: int | None = None
    """Reached by dp, the other sizes staying."""

    seed: int | None = None
    num_steps: int | None = None
    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    faults: tuple[str, ...] = ()
    """Added to the scenario's own."""

    out: Path | None = None
    """Folder for parquet files; None: into the store."""

    store_url: str | None = None
    as_json: bool = False


def simulate_run(options: SimulateOptions) -> str:
    """Simulate, store or write what was recorded, and return the planted truth, ready to print.

    Raises:
        ConfigError: The scenario or a fault is wrong, or they don't go together.
        BadInputError: ``--ranks`` does not fit the layout, or ``--out`` holds files.
        RunNameError: The name can't be stored.
        RunExistsError: The store holds a run of that name.
        StoreError: The store could not be opened or written.
    """
    from rankscope.trainer.simulator.simulation import simulate

    from .files import write_files
    from .store import store_simulation

    checked_run_name(options.run_id)
    simulation = simulate(scenario_of(options), run_id=options.run_id)
    steps = _shown(simulation)
    if options.out is not None:
        done = write_files(simulation, steps, folder=options.out)
        following = f"wrote {options.out}"
    else:
        with open_for_reading(options.store_url or default_store_url()) as store:
            done = store_simulation(store, simulation, steps)
        following = f"next: rankscope analyze {options.run_id}"
    if options.as_json:
        return json.dumps(truth_document(simulation, done))
    lines = [_counts_line(simulation, done), *map(truth_line, simulation.truth)]
    if not simulation.truth:
        lines.append("planted: nothing")
    return "\n".join([*lines, following])


def scenario_of(options: SimulateOptions) -> Scenario:
    """Return the scenario that the options name, with what they replace.

    Raises:
        ConfigError: It cannot be simulated.
        BadInputError: ``--ranks`` does not fit, or contradicts ``--dp``.
    """
    from rankscope.trainer.simulator.fault import parse_simulated_faults
    from rankscope.trainer.simulator.presets import preset_faults, preset_settings
    from rankscope.trainer.simulator.scenario import Scenario
    from rankscope.trainer.simulator.scenario_file import read_scenario_file

    path = Path(options.scenario)
    is_file = path.suffix in SCENARIO_SUFFIXES
    replaced = _replaced(options)
    if is_file:
        settings = read_scenario_file(path) | replaced
    else:
        settings = preset_settings(options.scenario, **replaced)
    planted = settings.pop("faults", ())
    # Faults are checked last: against the sizes that the flags made, not the scenario's own.
    bare = _resized(Scenario(**settings), options)
    if not is_file:
        planted = preset_faults(options.scenario, bare)
    return replace(bare, faults=(*planted, *parse_simulated_faults(options.faults)))


def truth_line(truth: Truth) -> str:
    """Return one planted thing on one line."""
    parts = [f"planted: {truth.cause}"]
    if truth.ranks:
        parts.append(f"on {_ranks_text(truth.ranks)}")
    if truth.visible_ranks != truth.ranks:
        parts.append(f"(in the trace like {_ranks_text(truth.visible_ranks)})")
    parts.append("steps {} to {}".format(*truth.steps))
    if truth.factor is not None:
        parts.append(f"x {truth.factor:.3g}")
    if truth.extra_ns is not None:
        parts.append(f"+ {truth.extra_ns / NS_PER_MS:g} ms")
    if truth.detail:
        parts.append(truth.detail)
    return ", ".join([" ".join(parts[:2]), *parts[2:]]) if truth.ranks else ", ".join(parts)


def truth_document(simulation: Simulation, done: Simulated) -> dict[str, Any]:
    """Return what was simulated and planted as one JSON document."""
    return {
        "run": simulation.run_id,
        "world_size": simulation.scenario.world_size,
        "layout": simulation.scenario.layout.to_dict(),
        "num_steps": done.num_steps,
        "num_spans": done.num_spans,
        "seed": simulation.scenario.seed,
        "truth": [asdict(truth) for truth in simulation.truth],
    }


def _replaced(options: SimulateOptions) -> dict[str, Any]:
    given = {
        "seed": options.seed,
        "num_steps": options.num_steps,
        "dp": options.dp,
        "pp": options.pp,
        "tp": options.tp,
    }
    return {name: value for name, value in given.items() if value is not None}


def _resized(scenario: Scenario, options: SimulateOptions) -> Scenario:
    """Return the scenario with as many data-parallel positions as make the ranks asked for."""
    if options.num_ranks is None:
        return scenario
    per_position = scenario.world_size // scenario.dp
    dp, rest = divmod(options.num_ranks, per_position)
    if rest or not dp:
        raise BadInputError(
            f"--ranks {options.num_ranks} must be a multiple of pp x tp x cp = {per_position}:"
            " choose another number, or other sizes"
        )
    if options.dp is not None and options.dp != dp:
        raise BadInputError(
            f"--ranks {options.num_ranks} needs --dp {dp}, got --dp {options.dp}: leave one out"
        )
    return replace(scenario, dp=dp)


def _shown(simulation: Simulation) -> Iterator[StepTables]:
    """Yield the steps, telling on stderr how far the simulation is."""
    progress = Progress(sys.stderr, every=PROGRESS_EVERY)
    for tables in simulation.tables():
        progress.show(f"simulated step {tables.step + 1} of {simulation.scenario.num_steps}")
        yield tables
    progress.end()


def _counts_line(simulation: Simulation, done: Simulated) -> str:
    return (
        f"simulated {simulation.run_id}: {done.num_spans:,} spans,"
        f" {done.num_steps} steps, {simulation.scenario.world_size:,} ranks"
    )


def _ranks_text(ranks: tuple[int, ...]) -> str:
    if len(ranks) > MAX_NAMED_RANKS:
        return f"{len(ranks):,} ranks"
    return format_ranks(ranks)
