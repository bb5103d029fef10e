"""Entry point of the command `rankscope`: run a subcommand, turn failures into exit statuses."""

from __future__ import annotations

import gc
import os
import sys

from .extras import advise_install, installed_version

BAD_ENVIRONMENT = 2
INTERRUPTED = 130


def main() -> int:
    """Run the command line of this process and return its exit status."""
    if sys.argv[1:] == ["--version"]:  # also without an extra
        print(f"rankscope {installed_version()}")
        return 0
    try:
        return _run()
    except ModuleNotFoundError as error:
        line = advise_install(
            error,
            user="the command",
            arguments=sys.argv[1:],
            store=os.environ.get("RANKSCOPE_STORE", ""),
        )
        if line is None:
            raise
        return _fail(line, BAD_ENVIRONMENT)
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
