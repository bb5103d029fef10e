"""The subcommands: each parses its flags and hands over; what is heavy loads inside it."""

from pathlib import Path
from typing import Annotated

import typer

from .flags import AsJson, Port, SpoolFolder, Store
from .serve import agent, serve
from .token import token

app = typer.Typer(
    name="rankscope",
    help="Which rank of a distributed training is truly slow, which only wait for it, and why.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", show_default=False)],
    *,
    file_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="What the files are: bytedance.")
    ],
    run: Annotated[str, typer.Option("--run", metavar="NAME", help="Name of the run.")],
    meta: Annotated[
        Path | None,
        typer.Option("--meta", metavar="FILE", help="YAML with the job's sizes (bytedance)."),
    ] = None,
    store: Store = None,
) -> None:
    """Store a trace that another program recorded, as a run."""
    from .import_trace import import_files

    typer.echo(import_files(files, file_format=file_format, run_id=run, meta=meta, store_url=store))


@app.command()
def analyze(
    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)],
    *,
    steps: Annotated[
        str, typer.Option(metavar="A:B", help="Steps A to B, both included; either may be empty.")
    ] = ":",
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """Say which rank is slow, which ranks wait for it, and why."""
    from .analyze import analyze_stored, parse_steps

    first, last = parse_steps(steps)
    typer.echo(analyze_stored(run, first=first, last=last, as_json=as_json, store_url=store))


@app.command()
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
    from ..simulation.run import SimulateOptions, simulate_run

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


@app.command()
def runs(
    *,
    delete: Annotated[
        str | None,
        typer.Option(
            "--delete",
            metavar="RUN",
            help="Delete this run for good; its name is not given again.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """List the runs of the store, the newest first, or delete one."""
    if delete is not None:
        from .delete_run import delete_run

        typer.echo(delete_run(delete, as_json=as_json, store_url=store))
        return
    from .lists import list_runs

    typer.echo(list_runs(as_json=as_json, store_url=store))


@app.command()
def alerts(*, as_json: AsJson = False, store: Store = None) -> None:
    """List the alerts that have fired, the newest first."""
    from .lists import list_alerts

    typer.echo(list_alerts(as_json=as_json, store_url=store))


@app.command()
def findings(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", show_default=False)] = None,
    *,
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """List what was found in live runs, each from its onset to its end."""
    from .lists import list_findings

    typer.echo(list_findings(run, as_json=as_json, store_url=store))


app.command()(serve)
app.command()(agent)


@app.command()
def demo(  # noqa: PLR0913  # one parameter a flag
    *,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 2,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel positions.")] = 2,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel positions.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 30,
    fault: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="What to plant, or none; default: slow-compute on rank 5, 1.8 times, from a"
            " third of the steps on.",
            show_default=False,
        ),
    ] = None,
    serve_after: Annotated[
        bool, typer.Option("--serve/--no-serve", help="Serve the dashboard afterwards.")
    ] = True,
    as_json: AsJson = False,
    port: Port = None,
    spool: SpoolFolder = None,
    store: Store = None,
) -> None:
    """Train a small GPT here with one slow rank, find that rank, and show it."""
    from ..demo.demo import DemoOptions, run_demo

    status = run_demo(
        DemoOptions(
            pp=pp,
            dp=dp,
            tp=tp,
            num_steps=steps,
            fault=fault,
            serve=serve_after,
            as_json=as_json,
            port=port,
            spool=spool,
            store_url=store,
        )
    )
    raise typer.Exit(status)


app.add_typer(token)
