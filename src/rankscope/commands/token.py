"""`rankscope token`: create, list and revoke the access tokens of the server."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.analysis.report.text import format_time

from ..errors import BadInputError
from ..terminal.lines import format_table
from .flags import AsJson

if TYPE_CHECKING:
    from rankscope.collector.http.tokens import Role, TokenRecord

NO_TOKENS = "no tokens yet: create one with `rankscope token create --role ingest`"

token = typer.Typer(
    name="token",
    help="Create, list and revoke access tokens.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@token.command("create")
def create_token(
    *,
    role: Annotated[
        str,
        typer.Option(
            metavar="ROLE", help="ingest, read, sql (may slow or stop the server) or admin."
        ),
    ],
    run_prefix: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Prefix of the names of the runs it is for. Default: all runs."
        ),
    ] = "",
    days: Annotated[int, typer.Option(min=1, help="Days until it expires.")] = 90,
    holder: Annotated[
        str, typer.Option(metavar="NAME", help="Who uses it. A holder has at most two live tokens.")
    ] = "default",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write it to a new file that only its owner may read."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a token and show it once; the server keeps a hash."""
    from rankscope.collector.http.tokens import (
        default_tokens_path,
        edit_tokens,
        make_token,
        write_private,
    )

    known_role = _parse_role(role)
    if out is not None and out.exists():
        raise BadInputError(f"--out {out} exists: give the name of a new file")
    with edit_tokens(default_tokens_path()) as records:
        secret, record = make_token(
            records,
            role=known_role,
            run_prefix=run_prefix,
            holder=holder,
            days=days,
            now_ns=time.time_ns(),
        )
        if out is not None:
            write_private(out, f"{secret}\n".encode())
        records.append(record)
    if as_json:
        shown = {"token": secret} if out is None else {"out": str(out)}
        typer.echo(json.dumps({**_document(record), **shown}))
    else:
        typer.echo(secret if out is None else f"wrote token {record.token_id} to {out}")


@token.command("list")
def list_tokens(*, as_json: AsJson = False) -> None:
    """List the tokens with holder, role and expiry."""
    from rankscope.collector.http.tokens import default_tokens_path, read_tokens

    records = read_tokens(default_tokens_path())
    if as_json:
        typer.echo(json.dumps({"tokens": [_document(record) for record in records]}))
        return
    now_ns = time.time_ns()
    rows = [
        (
            record.token_id,
            str(record.role),
            record.run_prefix or "(all)",
            record.holder,
            format_time(record.created_ns),
            format_time(record.expires_ns),
            str(record.state(now_ns)),
        )
        for record in records
    ]
    header = ("id", "role", "runs", "holder", "created (UTC)", "expires (UTC)", "state")
    typer.echo("\n".join(format_table(header, rows)) if rows else NO_TOKENS)


@token.command("revoke")
def revoke_token(
    token_id: Annotated[
        str, typer.Argument(metavar="ID", help="As `rankscope token list` shows it.")
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Revoke a token, from the next request on."""
    from rankscope.collector.http.tokens import default_tokens_path, edit_tokens, mark_revoked

    with edit_tokens(default_tokens_path()) as records:
        records[:] = mark_revoked(records, token_id, now_ns=time.time_ns())
        record = next(record for record in records if record.token_id == token_id)
    typer.echo(json.dumps(_document(record)) if as_json else f"revoked token {token_id}")


def _parse_role(text: str) -> "Role":
    from rankscope.collector.http.tokens import Role

    try:
        return Role(text)
    except ValueError:
        raise BadInputError(
            f"unknown --role {text}: give {', '.join(str(role) for role in Role)}"
        ) from None


def _document(record: "TokenRecord") -> dict[str, Any]:
    return {
        "id": record.token_id,
        "role": str(record.role),
        "run_prefix": record.run_prefix,
        "holder": record.holder,
        "created_ns": record.created_ns,
        "expires_ns": record.expires_ns,
        "revoked_ns": record.revoked_ns,
        "state": str(record.state(time.time_ns())),
    }
