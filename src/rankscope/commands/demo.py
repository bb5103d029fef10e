"""`rankscope demo`: train here with a slow rank, and find it."""

from typing import Annotated

import typer

from .flags import AsJson, Port, SpoolFolder, Store


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
