"""The command `rankscope` with its subcommands, each of which loads what it needs when it runs."""

import typer

from .agent import agent
from .analyze import analyze
from .demo import demo
from .import_trace import import_
from .runs import alerts, findings, runs
from .serve import serve
from .simulate import simulate
from .token import token

app = typer.Typer(
    name="rankscope",
    help="Find the slow rank of a distributed training, the ranks that wait for it, and the cause.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.command("import")(import_)
app.command()(analyze)
app.command()(simulate)
app.command()(runs)
app.command()(alerts)
app.command()(findings)
app.command()(serve)
app.command()(agent)
app.command()(demo)
app.add_typer(token)
