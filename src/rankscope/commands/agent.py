"""`rankscope agent`: send the records of this host's ranks to a collector."""

from pathlib import Path
from typing import Annotated

import typer


def agent(  # noqa: PLR0913  # one parameter a flag
    *,
    spool: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder into which the ranks of this host write.")
    ],
    collector: Annotated[
        list[str],
        typer.Option(
            metavar="URL",
            help="https://HOST[:PORT]. May be repeated: if one fails, the next is tried.",
        ),
    ],
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the journal and for rejected rows, which only this user can write."
            " Default: one per spool in /var/lib/rankscope (root) or ~/.local/state/rankscope.",
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CA certificates that the collector's certificate is checked against.",
        ),
    ] = None,
    cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Client certificate of the agent.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Private key of the certificate.")
    ] = None,
    samples: Annotated[
        bool,
        typer.Option(
            "--samples/--no-samples", help="Also read the counters of this host and its devices."
        ),
    ] = True,
    logs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Logs of this host's ranks, such as '/logs/*/attempt_*/*/stderr.log' of torchrun"
            " or 'slurm-*.out': errors in them are sent. May be repeated.",
        ),
    ] = None,
    kernel_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Log of the kernel: a file of syslog where /dev/kmsg is not permitted.",
        ),
    ] = None,
    max_spool_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Largest size of the spool while the collector cannot be reached. Default: the"
            " quota of each rank.",
        ),
    ] = None,
) -> None:
    """Send the records of this host to a collector.

    The token is read from the file that the variable RANKSCOPE_TOKEN_FILE names.
    """
    from ..server.agent import AgentOptions, run_agent

    run_agent(
        AgentOptions(
            spool=spool,
            collectors=tuple(collector),
            state=state,
            ca=ca,
            certificate=cert,
            key=key,
            samples=samples,
            kernel_log=kernel_log,
            logs=tuple(logs or ()),
            max_spool_bytes=max_spool_bytes,
        )
    )
