"""`rankscope token`: create, list and revoke the access tokens of the server."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BadInputError
from ..terminal.lines import format_table, format_time
from .flags import AsJson

if TYPE_CHECKING:
    from rankscope.collector.http.tokens import Role, TokenRecord

token = typer.Typer(
    name="token",
    help="Create, list and revoke access tokens.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@token.command("create")
def token_create(
    *,
    role: Annotated[str, typer.Option(metavar="ROLE", help="ingest, read or admin.")],
    run_prefix: Annotated[
        str,
        typer.Option(
            "--run-prefix",
            metavar="TEXT",
            help="Prefix of the names of the runs it is for. Default: all runs.",
        ),
    ] = "",
    days: Annotated[int, typer.Option(min=1, help="Days until it expires.")] = 90,
    holder: Annotated[
        str, typer.Option(metavar="NAME", help="Who uses it. A holder has at most two live tokens.")
    ] = "default",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write the token to a new file that only its owner may read.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a token and show it once; the server keeps a hash."""
    typer.echo(
        create_token(
            role=role, run_prefix=run_prefix, holder=holder, days=days, out=out, as_json=as_json
        )
    )


@token.command("list")
def token_list(*, as_json: AsJson = False) -> None:
    """List the tokens with holder, role and expiry."""
    typer.echo(list_tokens(as_json=as_json))


@token.command("revoke")
def token_revoke(
    token_id: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="As `rankscope token list` shows it.", show_default=False
        ),
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Revoke a token, from the next request on."""
    typer.echo(revoke_token(token_id, as_json=as_json))


NO_TOKENS = "no tokens yet: create one with `rankscope token create --role ingest`"


def create_token(  # noqa: PLR0913  # one parameter a flag
    *,
    role: str,
    run_prefix: str,
    holder: str,
    days: int,
    out: Path | None,
    as_json: bool,
    tokens_path: Path | None = None,
) -> str:
    """Create a token and return printable text: the token, or the file that holds it.

    Args:
        role: ingest, read or admin.
        run_prefix: Prefix of the names of the runs it is for; "" for all runs.
        holder: Name of the person or program that uses it.
        days: Days until it expires.
        out: New file for the token, readable only by its owner. None: the token is printed.
        as_json: Whether to return one JSON document.
        tokens_path: The server's file of tokens. None: the default file.

    Raises:
        BadInputError: There is no such role, or ``out`` exists.
        TokenRequestError: A field is invalid, or the holder has two live tokens.
        TokenFileError: The server's file is invalid, or its permissions are too open.
    """
    from rankscope.collector.http.token_file import (
        default_tokens_path,
        held_tokens,
        write_private,
    )
    from rankscope.collector.http.tokens import make_token

    known = _role(role)
    if out is not None and out.exists():
        raise BadInputError(f"--out {out} exists: give the name of a new file")
    with held_tokens(tokens_path or default_tokens_path()) as records:
        token, record = make_token(
            records,
            role=known,
            run_prefix=run_prefix,
            holder=holder,
            days=days,
            now_ns=time.time_ns(),
        )
        if out is not None:
            write_private(out, f"{token}\n".encode())
        records.append(record)
    if as_json:
        shown = {"token": token} if out is None else {"out": str(out)}
        return json.dumps({**_document(record), **shown})
    return token if out is None else f"wrote token {record.token_id} to {out}"


def list_tokens(*, as_json: bool, tokens_path: Path | None = None) -> str:
    """Return the tokens, without their hashes, as printable text.

    Raises:
        TokenFileError: The server's file is invalid, or its permissions are too open.
    """
    from rankscope.collector.http.token_file import default_tokens_path, read_tokens

    records = read_tokens(tokens_path or default_tokens_path())
    if as_json:
        return json.dumps({"tokens": [_document(record) for record in records]})
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
    return "\n".join(format_table(header, rows)) if rows else NO_TOKENS


def revoke_token(token_id: str, *, as_json: bool, tokens_path: Path | None = None) -> str:
    """Revoke a token, from the server's next request on, and return a line that says so.

    Raises:
        TokenRequestError: No token has this id.
        TokenFileError: The server's file is invalid, or its permissions are too open.
    """
    from rankscope.collector.http.token_file import default_tokens_path, held_tokens
    from rankscope.collector.http.tokens import revoked

    with held_tokens(tokens_path or default_tokens_path()) as records:
        records[:] = revoked(records, token_id, now_ns=time.time_ns())
        record = next(record for record in records if record.token_id == token_id)
    return json.dumps(_document(record)) if as_json else f"revoked token {token_id}"


def _role(text: str) -> "Role":
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
