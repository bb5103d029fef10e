"""`rankscope log`: MFU, step times and the verdict of a run in the tracker that people look at."""

from enum import StrEnum
from typing import Annotated

import typer

from .flags import Store, existing_store_url


class Tracker(StrEnum):
    """Names of `rankscope.loggers.sinks.SINKS`."""

    WANDB = "wandb"
    MLFLOW = "mlflow"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    OTLP = "otlp"


def log(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    *,
    to: Annotated[
        Tracker, typer.Option(help="Where to. Each reads its own variables and settings.")
    ],
    into: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE",
            help="The tracker's run of the training: its id (wandb, mlflow), its log folder"
            " (tensorboard), PROJECT/NAME (trackio), or the receiver's address (otlp)."
            " Default: a new one.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where people open the pages of rankscope, for the link. Default: the server of"
            " the store.",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the store has the run.")] = False,
    store: Store = None,
) -> None:
    """Log a run into W&B, MLflow, TensorBoard, trackio or OpenTelemetry, until it has ended.

    It writes MFU, step time and slowdown of each step, the verdict, and a link. Called again, it
    goes on after the last step that it wrote.
    """
    from rankscope.collector.store.location import data_folder

    from ..loggers.follow import LogRequest, log_run
    from ..terminal.lines import say

    url = existing_store_url(store)
    request = LogRequest(run=run, to=to, into=into, address=address, waits=wait, store_url=url)
    typer.echo(log_run(request, folder=data_folder() / "logged", show=say))
