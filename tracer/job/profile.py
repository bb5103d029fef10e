"""Captures of a few steps by `torch.profiler`, requested through the control file."""

from __future__ import annotations

import functools
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from ..errors import is_tracer_error
from ..patches import Patches
from ..record.control import Requests
from ..spool import PROFILE, DropReason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ..record.control import Request
    from ..record.recorder import Recorder

MAX_PROFILES = 20
"""In the life of a process: each takes tens of megabytes."""

MAX_PROFILE_BYTES = 1 << 30


class ProfileError(Exception):
    """A profile that cannot be made; the message has the reason."""


class Profiles:
    """Takes requests on the background thread, profiles on the training thread, between steps.

    Only one profiler can run in a process. A request is refused while another profiler runs, and a
    profiler that the job starts ends this one.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._requests = Requests(PROFILE, rank=recorder.identity.rank, report=self._report)
        self._asked: Request | None = None
        self._running: _Running | None = None
        self._finished: list[_Running] = []
        self._num_left = MAX_PROFILES

    def take_control(self, document: Mapping[str, object]) -> None:
        """Take the request of a control file. Background thread."""
        self._asked = self._requests.take(document) or self._asked

    def step_begins(self) -> bool:
        """Begin or end a profile if it is due, on the training thread; return False, to be called
        again.
        """
        running, asked = self._running, self._asked
        if running is not None:
            if self._recorder.step_number >= running.end_step:
                self.finish()
        elif asked is not None and self._recorder.step_number >= (asked.first_step or 0):
            self._asked = None
            self._attempt(functools.partial(self._begin, asked), asked)
        return False

    def finish(self, reason: str = "") -> None:
        """End the running profile, if any, and pass it to the background thread."""
        running = self._running
        # The profiler's state belongs to the thread that started it.
        if running is None or running.thread_id != threading.get_ident():
            return
        self._running = None
        running.reason = reason
        running.end_step = min(running.end_step, self._recorder.step_number)
        self._attempt(functools.partial(self._end, running), running.request)

    def write(self) -> None:
        """Write profiles that have ended. Background thread."""
        while self._finished:
            running = self._finished.pop(0)
            self._attempt(functools.partial(self._write, running), running.request)

    def _begin(self, request: Request) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            raise ProfileError("refused: the job has not loaded torch")
        if torch._C._autograd._profiler_enabled():
            raise ProfileError("refused: another profiler is active")
        if not self._num_left:
            raise ProfileError(f"refused: the limit of {MAX_PROFILES} profiles is reached")
        from torch import profiler

        self._num_left -= 1
        first_step = self._recorder.step_number
        running = _Running(request, first_step, profiler.profile())
        running.profiler.start()
        self._running = running
        running.patches.wrap(torch.autograd.profiler.profile, "_prepare_trace", self._wrap_prepare)

    def _wrap_prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``original``, which a profiler calls before it starts, so that it first ends this
        one.
        """

        @functools.wraps(original)
        def prepare(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self.finish("the job started its own profiler")
            return original(*args, **kwargs)

        return prepare

    def _end(self, running: _Running) -> None:
        running.patches.undo()
        running.profiler.stop()
        self._finished.append(running)

    def _write(self, running: _Running) -> None:
        folder = self._recorder.folder
        name = f"profile-{running.first_step:09d}.json"
        num_bytes = _export(running.profiler, folder / name)
        if num_bytes > MAX_PROFILE_BYTES:
            (folder / name).unlink()
            raise ProfileError(f"deleted: {num_bytes} bytes are above {MAX_PROFILE_BYTES}")
        last_step = max(running.end_step - 1, running.first_step)
        self._report(
            f"steps {running.first_step} to {last_step} profiled"
            + (f"; cut short: {running.reason}" if running.reason else ""),
            {
                **running.request.describe("done"),
                "path": f"{folder.parent.name}/{folder.name}/{name}",
                "steps": [running.first_step, last_step],
                "num_bytes": num_bytes,
            },
        )

    def _attempt(self, work: Callable[[], None], request: Request) -> None:
        try:
            work()
        except ProfileError as problem:
            self._report(str(problem), request.describe("refused"))
        except Exception as problem:
            # Signal handlers of the job run in the main thread only.
            if threading.current_thread() is threading.main_thread() and not is_tracer_error(
                problem
            ):
                raise
            self._recorder.drop(DropReason.INTERNAL_ERROR)
            data = {**request.describe("refused"), "error": repr(problem)[:500]}
            self._report("failed", data)

    def _report(self, text: str, data: dict[str, object]) -> None:
        self._recorder.event("profile", text, data)


class _Running:
    def __init__(self, request: Request, first_step: int, profiler: Any) -> None:  # noqa: ANN401
        self.request = request
        self.first_step = first_step
        self.end_step = first_step + request.num_steps
        self.profiler = profiler
        self.thread_id = threading.get_ident()
        self.patches = Patches()
        self.reason = ""


def offer_profiles(recorder: Recorder) -> None:
    """Accept requests for profiles from now on."""
    profiles = Profiles(recorder)
    recorder.on_control(profiles.take_control)
    recorder.on_step_begin(profiles.step_begins)
    recorder.on_tick(profiles.write)
    recorder.on_shutdown(lambda: profiles.finish("the tracer was shut down"))


def _export(profiler: Any, path: Path) -> int:  # noqa: ANN401
    """Write the file and rename it, so that a reader sees all or nothing; return its size.

    The profiler would follow a link, so the name is a random one.
    """
    fresh = path.with_name(f".{path.name}.{os.urandom(8).hex()}.new")
    try:
        profiler.export_chrome_trace(str(fresh))
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return path.stat().st_size
