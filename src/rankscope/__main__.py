"""Entry point of the command `rankscope`: run a subcommand, turn failures into exit statuses."""

from __future__ import annotations

import gc
import os
import sys

BAD_ENVIRONMENT = 2
INTERRUPTED = 130

SERVER_EXTRA = frozenset(
    {
        "a2wsgi",
        "chdb",
        "clickhouse_connect",
        "dash",
        "dash_ag_grid",
        "dash_mantine_components",
        "fastapi",
        "networkx",
        "numpy",
        "plotly",
        "prometheus_client",
        "pyarrow",
        "rich",
        "typer",
        "urllib3",
        "uvicorn",
        "yaml",
    }
)
"""Modules installed by the extra ``server``; the base install has none of them."""


def main() -> int:
    """Run the command line of this process and return its exit status."""
    try:
        return _run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in SERVER_EXTRA:
            raise
        return _fail(
            f"{missing} is not installed, and the command needs it:"
            ' pip install "rankscope[server]"',
            BAD_ENVIRONMENT,
        )
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of the output has exited (`| head`): flushing into it at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run() -> int:
    import typer

    from .commands.app import app
    from .errors import find_exit_code, format_error

    try:
        status = app(standalone_mode=False, prog_name="rankscope")
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return error.exit_code
        line = " ".join(error.format_message().split()).replace("Value error, ", "")
        context = getattr(error, "ctx", None)
        command = "rankscope" if context is None else context.command_path
        line = line if line.endswith("?") else f"{line.rstrip('.')}."
        return _fail(f"{line} See `{command} --help`", error.exit_code)
    except (ModuleNotFoundError, BrokenPipeError):
        raise
    except Exception as error:
        code = find_exit_code(error)
        if code is None:
            raise
        return _fail(format_error(error), code)
    sys.stdout.flush()
    gc.freeze()  # the collections at the interpreter's end would visit all objects: 0.06 s
    if status == INTERRUPTED:  # typer turns a KeyboardInterrupt into this status
        raise KeyboardInterrupt
    return status or 0


def _fail(line: str, status: int) -> int:
    from .terminal.lines import printable

    print(f"rankscope: {printable(line)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
