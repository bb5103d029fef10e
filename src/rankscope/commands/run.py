"""`rankscope run`: a training command of this host, traced, with its verdict at the end."""

import sys
from typing import Annotated

import typer

from .flags import Port, Store


def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...",
            help="Program and arguments: torchrun ... train.py, accelerate launch ..., python ...",
        ),
    ],
    *,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Name of the run. Default: that of the script, with the time."
        ),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve",
            help="Serve the dashboard meanwhile, and on a terminal afterwards until Ctrl-C.",
        ),
    ] = False,
    port: Port = None,
    store: Store = None,
) -> None:
    """Run a training command of this host, traced, and say at its end which rank was slow.

    The command's output, signals and exit status are its own. Options of rankscope come before it.
    """
    from ..job.run_job import JobOptions, run_job

    options = JobOptions(command=tuple(command), name=name, serve=serve, port=port, store_url=store)
    sys.exit(run_job(options))  # not typer's exit, which takes 130 for a Ctrl-C at this command
