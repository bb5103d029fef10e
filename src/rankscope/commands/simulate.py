"""`rankscope simulate`: simulate a training run and store what it would have recorded."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.analysis.report.text import (
    format_count,
    format_percent,
    format_ranks,
    format_seconds,
)
from rankscope.tracer.span import NS_PER_MS

from ..terminal.lines import Progress
from .flags import AsJson, RunName, Store, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rankscope.trainer.simulator.labels import Label
    from rankscope.trainer.simulator.scenario import Scenario
    from rankscope.trainer.simulator.simulation import Simulation
    from rankscope.trainer.simulator.tables import StepTables

    from ..simulation import SimulateOptions, SimulationSize

MAX_NAMED_RANKS = 8
"""More ranks are counted instead of listed."""

PROGRESS_EVERY = 10
MILLION = 1_000_000


def simulate(  # noqa: PLR0913  # one parameter a flag
    scenario: Annotated[
        str,
        typer.Argument(
            metavar="SCENARIO",
            help="healthy, a cause (slow-compute, slow-link, ...), or a .toml or .json file.",
        ),
    ],
    *,
    run: RunName,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks; dp is chosen to match.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all random numbers.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of optimizer steps.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel size.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Number of pipeline stages.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel size.")] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Add a fault, such as slow-link:src=3,dst=7,factor=4. May be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write parquet files into this folder instead of the store."
        ),
    ] = None,
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """Simulate a training run of any size, with faults."""
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
    """Simulate a run, store it or write it to files, and return its labels as printable text.

    Raises:
        ConfigError: The scenario or a fault is invalid, or the fault does not fit the scenario.
        BadInputError: ``--ranks`` does not fit the layout, or the folder of ``--out`` has files.
        RunNameError: The name is not a valid run name.
        RunExistsError: The store holds another run of this name.
        StoreError: The store could not be opened or written.
    """
    from rankscope.collector.identity import check_run_name
    from rankscope.trainer.simulator.simulation import simulate

    from ..simulation import build_scenario, store_simulation, write_files

    check_run_name(options.run_id)
    simulation = simulate(build_scenario(options), run_id=options.run_id)
    with Progress(every=PROGRESS_EVERY) as progress:
        line = StepProgress(simulation.scenario, progress)
        steps = line.follow(simulation.tables())
        if options.out is not None:
            done = write_files(simulation, steps, folder=options.out)
            last_line = f"written to {options.out}"
        else:
            with open_store(options.store_url) as store:
                done = store_simulation(store, simulation, steps, on_stored=line.stored)
            last_line = f"Next: rankscope analyze {options.run_id}"
    if options.as_json:
        return json.dumps(simulation_document(simulation, done))
    lines = [
        (
            f"simulated run {simulation.run_id}: {done.num_spans:,} spans,"
            f" {done.num_steps} steps, {simulation.scenario.world_size:,} ranks"
        ),
        *map(format_label, simulation.labels),
    ]
    if not simulation.labels:
        lines.append("fault: none")
    return "\n".join([*lines, last_line])


def format_label(label: "Label") -> str:
    """Return one fault of the simulation on one line."""
    parts = [f"fault: {label.cause}"]
    if label.ranks:
        parts.append(f"on {_ranks_text(label.ranks)}")
    if label.visible_ranks != label.ranks:
        parts.append(f"(the trace cannot distinguish {_ranks_text(label.visible_ranks)})")
    parts.append("steps {} to {}".format(*label.steps))
    if label.factor is not None:
        parts.append(f"factor {label.factor:.3g}")
    if label.extra_ns is not None:
        parts.append(f"+ {label.extra_ns / NS_PER_MS:g} ms")
    if label.detail:
        parts.append(label.detail)
    return ", ".join([" ".join(parts[:2]), *parts[2:]]) if label.ranks else ", ".join(parts)


def simulation_document(simulation: "Simulation", done: "SimulationSize") -> dict[str, Any]:
    """Return the size and the labels of a simulation as a JSON document."""
    return {
        "run": simulation.run_id,
        "world_size": simulation.scenario.world_size,
        "layout": simulation.scenario.layout.to_dict(),
        "num_steps": done.num_steps,
        "num_spans": done.num_spans,
        "seed": simulation.scenario.seed,
        "truth": [asdict(label) for label in simulation.labels],
    }


class StepProgress:
    """The line about a simulation: step, spans so far, and the time that is left.

    Args:
        scenario: What is simulated.
        progress: Where the line is shown.
        monotonic_s: Clock.
    """

    def __init__(
        self,
        scenario: "Scenario",
        progress: Progress,
        *,
        monotonic_s: "Callable[[], float]" = time.monotonic,
    ) -> None:
        self._num_steps = scenario.num_steps
        self._ranks = format_count(scenario.world_size, "rank")
        self._progress = progress
        self._monotonic_s = monotonic_s
        self._begun_s = monotonic_s()
        self._num_done = 0
        self._num_spans = 0
        self._num_of_step = 0

    def follow(self, steps: "Iterable[StepTables]") -> "Iterator[StepTables]":
        """Yield the tables of each step and show what is done with it."""
        self._progress.show(self._line("simulating"))
        for tables in steps:
            self._num_of_step = tables.spans.num_rows
            self._progress.replace(self._line("storing"))
            yield tables
            self._num_done += 1
            self._num_spans += self._num_of_step
            self._num_of_step = 0
            if self._num_done < self._num_steps:
                self._progress.show(self._line("simulating"))
        self._progress.replace(f"storing the description of {self._ranks}")

    def stored(self, num_spans: int) -> None:
        """Show how many spans of the step are stored."""
        share = num_spans / max(self._num_of_step, 1)
        self._progress.replace(self._line(f"storing {format_percent(share, digits=0)}"))

    def _line(self, doing: str) -> str:
        parts = [f"step {self._num_done + 1} of {self._num_steps}, {self._ranks}: {doing}"]
        if self._num_spans:
            num = self._num_spans
            spans = f"{num / MILLION:.1f} M" if num >= MILLION else f"{num:,}"
            parts.append(f"{spans} spans stored")
            left_s = (self._monotonic_s() - self._begun_s) / self._num_done
            parts.append(f"{format_seconds(left_s * (self._num_steps - self._num_done))} left")
        return ", ".join(parts)


def _ranks_text(ranks: tuple[int, ...]) -> str:
    if len(ranks) > MAX_NAMED_RANKS:
        return f"{len(ranks):,} ranks"
    return format_ranks(ranks)
