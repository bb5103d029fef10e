"""The subcommands of `rankscope token`."""

from pathlib import Path
from typing import Annotated

import typer

from .flags import AsJson

token = typer.Typer(
    name="token",
    help="Make, list and revoke the tokens that let agents and people in.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@token.command("create")
def token_create(
    *,
    role: Annotated[str, typer.Option(metavar="ROLE", help="ingest, read or admin.")],
    run_prefix: Annotated[
        str,
        typer.Option("--run-prefix", metavar="TEXT", help="Runs that begin so; default: all."),
    ] = "",
    days: Annotated[int, typer.Option(min=1, help="How long it lives.")] = 90,
    holder: Annotated[
        str, typer.Option(metavar="NAME", help="Who carries it; two live ones for each.")
    ] = "default",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the token there, for its owner alone."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token; it is shown once and kept as a hash."""
    from .token_actions import create_token

    typer.echo(
        create_token(
            role=role, run_prefix=run_prefix, holder=holder, days=days, out=out, as_json=as_json
        )
    )


@token.command("list")
def token_list(*, as_json: AsJson = False) -> None:
    """List the tokens: whose, for what, until when; never the tokens themselves."""
    from .token_actions import list_tokens

    typer.echo(list_tokens(as_json=as_json))


@token.command("revoke")
def token_revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)],
    *,
    as_json: AsJson = False,
) -> None:
    """Make a token worthless, from the next request on."""
    from .token_actions import revoke_token

    typer.echo(revoke_token(token_id, as_json=as_json))
