"""The command `rankscope` with its subcommands, each of which loads what it needs when it runs."""

from typing import TYPE_CHECKING, Annotated

import typer

from .agent import agent
from .alerts import alerts
from .analyze import analyze
from .check_spool import check_spool
from .compare import compare
from .control import control
from .demo import demo
from .doctor import doctor
from .export import export
from .hosts import hosts
from .import_trace import import_
from .log import log
from .mcp import mcp
from .notebooks import notebooks
from .run import run
from .runs import findings, runs
from .serve import serve
from .simulate import simulate
from .token import token

if TYPE_CHECKING:
    from collections.abc import Callable

app = typer.Typer(
    name="rankscope",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def print_version(is_wanted: bool) -> None:  # noqa: FBT001 - typer passes the flag's value
    """Print the version and exit."""
    from ..extras import installed_version

    if is_wanted:
        typer.echo(f"rankscope {installed_version()}")
        raise typer.Exit


@app.callback()
def main(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Find the slow rank of a distributed training, the ranks that wait for it, and the cause."""


COMMANDS: "tuple[Callable[..., object], ...]" = (
    analyze, compare, simulate, export, findings, serve, agent, control, log, mcp, demo, notebooks,
    doctor,
)  # fmt: skip

app.command(context_settings={"allow_interspersed_args": False})(run)
app.command("import")(import_)
app.command("check-spool")(check_spool)
for command in COMMANDS:
    app.command()(command)
for group in (runs, alerts, hosts, token):
    app.add_typer(group)
