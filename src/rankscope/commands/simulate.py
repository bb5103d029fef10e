"""`rankscope simulate`: run a synthetic cluster with planted faults, and keep what it recorded."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.tracer.span import NS_PER_MS

from ..terminal.lines import Progress
from .flags import AsJson, Store

if TYPE_CHECKING:
    from rankscope.trainer.simulator.simulation import Simulation
    from rankscope.trainer.simulator.tables import StepTables
    from rankscope.trainer.simulator.truth import Truth

    from ..simulation import Simulated, SimulateOptions

MAX_NAMED_RANKS = 8
"""More are counted, not listed."""

PROGRESS_EVERY = 10


def simulate(  # noqa: PLR0913  # one parameter a flag
    scenario: Annotated[
        str,
        typer.Argument(
            metavar="SCENARIO",
            help="healthy, a cause (slow-compute, slow-link, ...), or a .toml or .json file.",
            show_default=False,
        ),
    ],
    *,
    run: Annotated[str, typer.Option("--run", metavar="NAME", help="Name of the run.")],
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks, reached by --dp.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of all randomness.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel positions.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel positions.")] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="A further fault, as in the demo; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write parquet files there and nothing to the store."),
    ] = None,
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """Make up a run of a cluster of any size, with faults that are told afterwards."""
    from ..simulation import SimulateOptions

    typer.echo(
        simulate_run(
            SimulateOptions(
                scenario=scenario,
                run_id=run,
                num_ranks=ranks,
                seed=seed,
                num_steps=steps,
                dp=dp,
                pp=pp,
                tp=tp,
                faults=tuple(fault or ()),
                out=out,
                store_url=store,
                as_json=as_json,
            )
        )
    )


def simulate_run(options: "SimulateOptions") -> str:
    """Simulate, store or write what was recorded, and return the planted truth, ready to print.

    Raises:
        ConfigError: The scenario or a fault is wrong, or they don't go together.
        BadInputError: ``--ranks`` does not fit the layout, or ``--out`` holds files.
        RunNameError: The name can't be stored.
        RunExistsError: The store holds a run of that name.
        StoreError: The store could not be opened or written.
    """
    from rankscope.collector.client.served_store import open_for_reading
    from rankscope.collector.identity import check_run_name
    from rankscope.collector.store.location import default_store_url
    from rankscope.trainer.simulator.simulation import simulate

    from ..simulation import scenario_of, store_simulation, write_files

    check_run_name(options.run_id)
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


def truth_line(truth: "Truth") -> str:
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


def truth_document(simulation: "Simulation", done: "Simulated") -> dict[str, Any]:
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


def _shown(simulation: "Simulation") -> Iterator["StepTables"]:
    """Yield the steps, telling on stderr how far the simulation is."""
    progress = Progress(sys.stderr, every=PROGRESS_EVERY)
    for tables in simulation.tables():
        progress.show(f"simulated step {tables.step + 1} of {simulation.scenario.num_steps}")
        yield tables
    progress.end()


def _counts_line(simulation: "Simulation", done: "Simulated") -> str:
    return (
        f"simulated {simulation.run_id}: {done.num_spans:,} spans,"
        f" {done.num_steps} steps, {simulation.scenario.world_size:,} ranks"
    )


def _ranks_text(ranks: tuple[int, ...]) -> str:
    from rankscope.analysis.report.text import format_ranks

    if len(ranks) > MAX_NAMED_RANKS:
        return f"{len(ranks):,} ranks"
    return format_ranks(ranks)
