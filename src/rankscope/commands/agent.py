"""`rankscope agent`: ship what the ranks of this host record to a collector."""

from pathlib import Path
from typing import Annotated

import typer


def agent(  # noqa: PLR0913  # one parameter a flag
    *,
    spool: Annotated[
        Path, typer.Option("--spool", metavar="DIR", help="Folder that this host's ranks write to.")
    ],
    collector: Annotated[
        list[str],
        typer.Option(
            "--collector",
            metavar="URL",
            help="https://HOST[:PORT]; may be repeated: when one fails the next is asked.",
        ),
    ],
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="What was sent and not confirmed, and what was refused; default: DIR/.agent.",
            show_default=False,
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Who may sign the collector's certificate."),
    ] = None,
    cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The agent's own certificate.")
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="And its key.")] = None,
    samples: Annotated[
        bool,
        typer.Option("--samples/--no-samples", help="Read this host and its devices too."),
    ] = True,
    max_spool_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most bytes of the spool while nothing can be shipped; default: what the ranks"
            " allow themselves.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Ship what this host's ranks record to a collector; RANKSCOPE_TOKEN_FILE names the token."""
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
            max_spool_bytes=max_spool_bytes,
        )
    )
