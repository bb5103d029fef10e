"""When a collective is done, told by the backend itself."""

from __future__ import annotations

import time
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import is_tracer_error

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_S = 0.001
UNWIND_S = 0.1
"""What a thread may take, on a busy machine, from the end of a callback to the end of its C++."""

CAN_CALL_BACK = torch.torch_version.TorchVersion(torch.__version__) >= "2.8"
"""Whether a callback may be left with a work whose group the job may destroy.

Before, torch destroyed a group by a thread that held the interpreter's lock and waited for the
group's threads (pytorch/pytorch#154976), of which one may wait for that lock, to call us back.
"""


class Completions:
    """Callbacks that wait on the backend's threads."""

    def __init__(self) -> None:
        self._pending: dict[int, Any] = {}

    def watch(
        self,
        work: Any,  # noqa: ANN401 - a pybind class
        note: Callable[[int], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Call ``note`` with the moment (monotonic) at which ``work`` is done.

        It is called on the backend's thread, or here and now where the work is
        done already. A failed work is done too. Where its backend has no futures
        nobody calls it; nor later, where none may be called back (`CAN_CALL_BACK`).

        Args:
            work: A work.
            note: What to call.
            fail: Told what ``note`` raises on the backend's thread; here it passes.
        """
        key = id(work)

        def done(_: Any) -> None:  # noqa: ANN401
            now_ns = monotonic_ns()
            try:
                note(now_ns)
            except Exception as problem:  # noqa: BLE001 - promise 1: harmless
                fail(problem)
            finally:
                # Last: whoever drains must not end the interpreter under our feet.
                self._pending.pop(key, None)

        try:
            future = work.get_future()
        except Exception as problem:
            # A backend need not have futures. A method of the job's own class may raise what
            # it likes: nobody asked it but us.
            if type(work).get_future is dist.Work.get_future and not is_tracer_error(problem):
                raise
            return
        if future.done():
            # Not by the callback: what a signal handler of the job raises in one is lost.
            note(monotonic_ns())
            return
        if not CAN_CALL_BACK:
            return
        self._pending[key] = work
        future.add_done_callback(done)

    def drain(self) -> None:
        """Wait until every callback has run; for the very end of the process only.

        A callback that finds the interpreter gone would abort the process. It
        takes no longer than without us: gloo's process group waits for the same
        works when it is destroyed, which is what comes next.
        """
        if not self._pending:
            return
        while self._pending:
            time.sleep(POLL_S)
        # The backend's thread still has to take our function apart, for which it needs the GIL.
        time.sleep(UNWIND_S)
