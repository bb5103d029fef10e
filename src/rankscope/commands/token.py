"""`rankscope token`: make, list and revoke the tokens that the server lets in."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BadInputError
from ..terminal.lines import aligned, format_time
from .flags import AsJson

if TYPE_CHECKING:
    from rankscope.collector.http.tokens import Role, TokenRecord

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
    typer.echo(
        create_token(
            role=role, run_prefix=run_prefix, holder=holder, days=days, out=out, as_json=as_json
        )
    )


@token.command("list")
def token_list(*, as_json: AsJson = False) -> None:
    """List the tokens: whose, for what, until when; never the tokens themselves."""
    typer.echo(list_tokens(as_json=as_json))


@token.command("revoke")
def token_revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)],
    *,
    as_json: AsJson = False,
) -> None:
    """Make a token worthless, from the next request on."""
    typer.echo(revoke_token(token_id, as_json=as_json))


NO_TOKENS = "no tokens yet: `rankscope token create --role ingest --run-prefix NAME` makes one"


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
    """Make a token and return what to print: the token alone, once, or where it was written.

    Args:
        role: ingest, read or admin.
        run_prefix: Runs whose names begin so; "" for all.
        holder: Who or what will carry it.
        days: How long it lives.
        out: New file for the token, readable by its owner alone; None: it is printed.
        as_json: Whether as one JSON document.
        tokens_path: The server's file; None: the default one.

    Raises:
        BadInputError: There is no such role, or ``out`` exists.
        TokenRequestError: A field is not of its form, or the holder has two live tokens.
        TokenFileError: The server's file can't be trusted.
    """
    from rankscope.collector.http.token_file import (
        default_tokens_path,
        held_tokens,
        write_private,
    )
    from rankscope.collector.http.tokens import make_token

    known = _role(role)
    if out is not None and out.exists():
        raise BadInputError(f"--out {out} exists: name a new file")
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
    return token if out is None else f"token {record.token_id} is in {out}"


def list_tokens(*, as_json: bool, tokens_path: Path | None = None) -> str:
    """Return the tokens that there are, without their hashes, ready to print.

    Raises:
        TokenFileError: The server's file can't be trusted.
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
    return "\n".join(aligned(header, rows)) if rows else NO_TOKENS


def revoke_token(token_id: str, *, as_json: bool, tokens_path: Path | None = None) -> str:
    """Revoke a token, from the server's next request on; return what to print.

    Raises:
        TokenRequestError: No token has this id.
        TokenFileError: The server's file can't be trusted.
    """
    from rankscope.collector.http.token_file import default_tokens_path, held_tokens
    from rankscope.collector.http.tokens import revoked

    with held_tokens(tokens_path or default_tokens_path()) as records:
        records[:] = revoked(records, token_id, now_ns=time.time_ns())
        record = next(record for record in records if record.token_id == token_id)
    return json.dumps(_document(record)) if as_json else f"token {token_id} is revoked"


def _role(text: str) -> "Role":
    from rankscope.collector.http.tokens import Role

    try:
        return Role(text)
    except ValueError:
        raise BadInputError(
            f"--role {text}: there are {', '.join(str(role) for role in Role)}"
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
