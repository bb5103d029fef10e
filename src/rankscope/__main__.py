"""The command `rankscope`: runs one subcommand and turns failures into exit statuses."""

from __future__ import annotations

import os
import sys

BAD_ENVIRONMENT = 2
INTERRUPTED = 130

OF_THE_SERVER_EXTRA = frozenset(
    {
        "a2wsgi",
        "chdb",
        "clickhouse_connect",
        "dash",
        "dash_mantine_components",
        "fastapi",
        "networkx",
        "numpy",
        "plotly",
        "prometheus_client",
        "pyarrow",
        "typer",
        "urllib3",
        "uvicorn",
        "yaml",
    }
)
"""Top-level modules that the extra ``server`` brings; the base install has none of them."""


def main() -> int:
    """Run the command line of this process; return its exit status."""
    try:
        return _run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in OF_THE_SERVER_EXTRA:
            raise
        return _fail(
            f"{missing} is not installed: the command needs the server extra,"
            ' pip install "rankscope[server]"',
            BAD_ENVIRONMENT,
        )
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`); the exit must not flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run() -> int:
    import typer

    from .commands.app import app
    from .errors import exit_code_of, plain_line

    try:
        status = app(standalone_mode=False, prog_name="rankscope")
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return error.exit_code
        line = " ".join(error.format_message().split())
        return _fail(f"{line.rstrip('.')}; `rankscope --help` lists the flags", error.exit_code)
    except (ModuleNotFoundError, BrokenPipeError):
        raise
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            raise
        return _fail(plain_line(error), code)
    sys.stdout.flush()
    if status == INTERRUPTED:  # typer makes this of a KeyboardInterrupt
        raise KeyboardInterrupt
    return status or 0


def _fail(line: str, status: int) -> int:
    from .terminal.lines import printable

    print(f"rankscope: {printable(line)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
