"""Put ourselves between the job and torch's communication operators."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tracer.capture.operation import NAMESPACE, Operation, find_operations
from tracer.clock import monotonic_ns

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from tracer.capture.communication import Communication
    from tracer.capture.launch import Launch
    from tracer.capture.patch import Patches

KEY = "BackendSelect"
"""Dispatch key of our kernels: the last before the backend's own.

Whoever communicates, Python, DTensor's functional collectives or the C++ of
DDP, comes through here, in inference mode too; what only pretends to (fake
tensors, a compiler's trace) has been served by a key before this one.
"""

ENGINE_FRAME = "_engine_run_backward"
"""The Python function that is innermost while C++ autograd nodes run."""

DISTRIBUTED_FILES = "/torch/distributed/"
MAX_FRAMES = 12
NO_BACKWARD = -1


def intercept(communication: Communication, patches: Patches) -> Callable[[], None]:
    """Show every launch and every wait to ``communication``.

    Args:
        communication: What follows them.
        patches: Where replaced functions are noted.

    Returns:
        A function that takes the operators' kernels out again.
    """
    libraries = [_launches(communication), _functional_waits(communication)]
    patches.wrap(dist.Work, "wait", functools.partial(_work_wait, communication))
    patches.wrap(dist, "batch_isend_irecv", functools.partial(_batch, communication))
    patches.wrap(dist, "_broadcast_coalesced", functools.partial(_blocking_call, communication))

    def take_out() -> None:
        for library in libraries:
            library._destroy()  # type: ignore[no-untyped-call]

    return take_out


def _launches(communication: Communication) -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
    watch = BackwardWatch(communication)
    for operation in find_operations():
        kernel = _launch_kernel(communication, operation, watch)
        library.impl(operation.op_name, kernel, KEY, with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def _launch_kernel(
    communication: Communication, operation: Operation, watch: BackwardWatch
) -> Callable[..., Any]:
    redispatch = operation.op.redispatch
    after = _keys_after()

    def kernel(keyset: Any, *args: Any) -> Any:  # noqa: ANN401
        launch = communication.begin(operation, args)
        if launch is None:
            return redispatch(keyset & after, *args)
        try:
            out = redispatch(keyset & after, *args)
        except BaseException:
            communication.failed(launch)
            raise
        communication.launched(launch, operation, args, out)
        watch.look(launch)
        return out

    return kernel


def _functional_waits(communication: Communication) -> torch.library.Library:
    """Record what ``wait_tensor`` waits for: DTensor and functional collectives wait there."""
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    redispatch = torch.ops._c10d_functional.wait_tensor.default.redispatch
    after = _keys_after()

    def kernel(keyset: Any, tensor: Any) -> Any:  # noqa: ANN401
        launches = communication.of_tensor(tensor)
        if not launches:
            return redispatch(keyset & after, tensor)
        start_ns = monotonic_ns()
        try:
            return redispatch(keyset & after, tensor)
        finally:
            communication.waited_in_turn(launches, start_ns, monotonic_ns())

    library.impl("wait_tensor", kernel, KEY, with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def _work_wait(communication: Communication, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        launch = communication.of_work(work)
        if launch is None:
            return original(work, *args, **kwargs)
        start_ns = monotonic_ns()
        try:
            done = original(work, *args, **kwargs)
        except BaseException as error:
            communication.waited(launch, start_ns, monotonic_ns(), error=error)
            raise
        communication.waited(launch, start_ns, monotonic_ns())
        return done

    return wait


def _batch(communication: Communication, original: Callable[..., Any]) -> Callable[..., Any]:
    """Give the operations of one `batch_isend_irecv` one interval."""

    @functools.wraps(original)
    def batch(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        communication.set_interval(communication.next_interval())
        try:
            return original(*args, **kwargs)
        finally:
            communication.set_interval(0)

    return batch


def _blocking_call(
    communication: Communication, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Record what a function of C++ launches and waits for by itself."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        start_ns = monotonic_ns()
        try:
            return original(*args, **kwargs)
        finally:
            launches = communication.of_thread(start_ns)
            if launches:
                communication.waited_in_turn(launches, launches[-1].start_ns, monotonic_ns())

    return call


class BackwardWatch:
    """Records what DDP waits for at the end of a backward, inside C++.

    DDP's reducer launches its buckets from autograd nodes and waits for them in
    a callback that the engine runs last. Seeing the first launch, we queue a
    callback of our own: it comes before DDP's, which is queued after the last
    launch, and queues another, which comes after it. Between the two lies the wait.
    """

    def __init__(self, communication: Communication) -> None:
        self._communication = communication
        self._watching = False

    def look(self, launch: Launch) -> None:
        """Watch the end of this backward, if an autograd node of C++ launched this."""
        if self._watching or torch._C._current_graph_task_id() == NO_BACKWARD:
            return
        if not launched_by_engine(sys._getframe(2)):
            return
        self._watching = True
        try:
            _queue(functools.partial(self._before, launch.start_ns))
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._communication.fail(problem)

    def _before(self, since_ns: int) -> None:
        self._watching = False
        start_ns = monotonic_ns()
        launches = self._communication.of_thread(since_ns)
        if launches:
            _queue(lambda: self._after(launches, start_ns))

    def _after(self, launches: list[Launch], start_ns: int) -> None:
        end_ns = monotonic_ns()
        still = [launch for launch in launches if self._communication.follows(launch)]
        self._communication.waited_in_turn(still, start_ns, end_ns)


def launched_by_engine(frame: FrameType | None) -> bool:
    """Return whether an autograd node of C++ made the call in ``frame``, and no Python of torch's.

    Modes of the job's (``__torch_dispatch__``) may lie in between; a function of
    `torch.distributed` means that a hook in Python communicates, and it waits in Python.
    """
    for _ in range(MAX_FRAMES):
        if frame is None or DISTRIBUTED_FILES in frame.f_code.co_filename:
            return False
        if frame.f_code.co_name == ENGINE_FRAME:
            return True
        frame = frame.f_back
    return False


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _keys_after() -> Any:  # noqa: ANN401 - a DispatchKeySet
    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
