"""`rankscope demo`: train on this host with a slow rank, and diagnose the run."""

from typing import Annotated

import typer

from .flags import AsJson, Port, SpoolFolder, Store


def demo(  # noqa: PLR0913  # one parameter a flag
    *,
    pp: Annotated[int, typer.Option(min=1, help="Number of pipeline stages.")] = 2,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel size.")] = 2,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps.")] = 30,
    fault: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Fault of the training, or none. Default: slow-compute on rank 5, factor 1.8,"
            " after a third of the steps.",
        ),
    ] = None,
    incident: Annotated[
        bool,
        typer.Option(
            "--incident",
            help="A rank is killed; find its host, exclude it, restart without it, show the"
            " goodput. Takes a minute or two, and no other option but --store.",
        ),
    ] = False,
    serve_after: Annotated[
        bool, typer.Option("--serve/--no-serve", help="Serve the dashboard afterwards.")
    ] = True,
    as_json: AsJson = False,
    port: Port = None,
    spool: SpoolFolder = None,
    store: Store = None,
) -> None:
    """Train a small GPT with a slow rank, and find it."""
    if incident:
        from ..demo.incident import run_incident

        raise typer.Exit(run_incident(store))
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
