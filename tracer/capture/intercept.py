"""Interception of torch's communication operators and waits."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .operation import NAMESPACE, Operation, find_operations
from .python_group import PythonGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType, FrameType

    from ..patches import Patches
    from .communication import Communication
    from .launch import Launch

KEY = "BackendSelect"
"""Dispatch key of the tracer's kernels: the last key before the backend's own.

Python, DTensor's functional collectives and the C++ of DDP all pass it, also in inference mode.
Calls that communicate nothing (fake tensors, a compiler's trace) end at an earlier key."""

ENGINE_FRAME = "_engine_run_backward"
"""Name of the innermost Python function while autograd nodes in C++ run."""

DISTRIBUTED_FILES = "/torch/distributed/"
CALL_FILES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/c10d_logger.py")
"""Files of the functions by which Python code launches, whether of the job or of torch."""

DDP_HOOK_FILES = "/torch/distributed/algorithms/ddp_comm_hooks/"
"""Folder of torch's own hooks for DDP's reducer, which waits for what they launch."""

TORCH_FILES = f"{Path(torch.__file__).parent}{os.sep}"
MODE = "__torch_dispatch__"
MAX_FRAMES = 16
MAX_BATCH_FRAMES = 6
NO_BACKWARD = -1

BLOCKING_CALLS = (
    (dist, "_broadcast_coalesced"),
    (dist, "_verify_params_across_processes"),
    (getattr(dist, "Reducer", None), "_rebuild_buckets"),
)
"""C++ functions by which DDP launches and waits in one call."""


def intercept(communication: Communication, patches: Patches) -> Callable[[], None]:
    """Pass every launch and wait to ``communication``.

    Returns:
        A function that removes the kernels.
    """
    watch = BackwardWatch(communication)
    libraries = [
        _register_launches(communication, watch),
        _register_functional_waits(communication),
    ]
    wrap_wait = functools.partial(_wrap_work_wait, communication)
    patches.wrap(dist.Work, "wait", wrap_wait)
    leave_batch = functools.partial(_leave_batch, communication, _batch_code())
    PythonGroups(
        communication,
        patches,
        wrap_wait=wrap_wait,
        before_launch=leave_batch,
        after_launch=watch.watch_backward,
    ).watch()
    for owner, name, wrap in (
        *((owner, name, _wrap_blocking_call) for owner, name in BLOCKING_CALLS),
        # Not `batch_isend_irecv` itself: the compiler recognizes that function by its identity.
        (dist.distributed_c10d, "_check_p2p_op_list", _wrap_batch_check),
        (dist.ProcessGroup, "_start_coalescing", _wrap_start_coalescing),
        (dist.ProcessGroup, "_end_coalescing", _wrap_end_coalescing),
    ):
        if hasattr(owner, name):  # in this version of torch
            patches.wrap(owner, name, functools.partial(wrap, communication))

    def remove_kernels() -> None:
        for library in libraries:
            library._destroy()  # type: ignore[no-untyped-call]

    return remove_kernels


def _register_launches(communication: Communication, watch: BackwardWatch) -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
    for operation in find_operations():
        kernel = _launch_kernel(communication, operation, watch)
        library.impl(operation.op_name, kernel, KEY, with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def _launch_kernel(
    communication: Communication, operation: Operation, watch: BackwardWatch
) -> Callable[..., Any]:
    redispatch = operation.op.redispatch
    after = _keys_after()
    batch_code = _batch_code()

    def kernel(keyset: Any, *args: Any) -> Any:  # noqa: ANN401
        # Nothing reports the end of a batch: a launch from outside of it ends it.
        if communication.thread.in_batch and not is_called_by(sys._getframe().f_back, batch_code):
            communication.end_batch()
        launch = communication.begin(operation, args)
        if launch is None:
            return redispatch(keyset & after, *args)
        try:
            out = redispatch(keyset & after, *args)
        except BaseException:
            communication.failed(launch)
            raise
        communication.launched(launch, operation, args, out)
        watch.watch_backward(launch)
        return out

    return kernel


def _batch_code() -> CodeType:
    code: CodeType = inspect.unwrap(dist.batch_isend_irecv).__code__
    return code


def _leave_batch(
    communication: Communication, batch_code: CodeType, caller: FrameType | None
) -> None:
    # The kernel has the same lines inline, because it is hot.
    if communication.thread.in_batch and not is_called_by(caller, batch_code):
        communication.end_batch()


def _register_functional_waits(communication: Communication) -> torch.library.Library:
    """Record the waits of ``wait_tensor``, which DTensor and functional collectives use."""
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    redispatch = torch.ops._c10d_functional.wait_tensor.default.redispatch
    after = _keys_after()

    def kernel(keyset: Any, tensor: Any) -> Any:  # noqa: ANN401
        launches = communication.find_by_tensor(tensor)
        if not launches:
            return redispatch(keyset & after, tensor)
        communication.wait_begins(launches)
        start_ns = monotonic_ns()
        try:
            return redispatch(keyset & after, tensor)
        finally:
            communication.record_waits(launches, start_ns, monotonic_ns())

    library.impl("wait_tensor", kernel, KEY, with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def _wrap_work_wait(
    communication: Communication, original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        launches = communication.find_by_work(work)
        if not launches:
            return original(work, *args, **kwargs)
        communication.wait_begins(launches)
        start_ns = monotonic_ns()
        try:
            done = original(work, *args, **kwargs)
        except BaseException as error:
            communication.record_work_wait(work, launches, start_ns, error=error)
            raise
        communication.record_work_wait(work, launches, start_ns)
        return done

    return wait


def _wrap_batch_check(
    communication: Communication, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Give the operations of one `batch_isend_irecv` one interval: it checks its list first."""

    @functools.wraps(original)
    def check(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        checked = original(*args, **kwargs)
        communication.begin_batch()
        return checked

    return check


def _wrap_start_coalescing(
    communication: Communication, original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def start_coalescing(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        communication.begin_coalescing()
        return original(*args, **kwargs)

    return start_coalescing


def _wrap_end_coalescing(
    communication: Communication, original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def end_coalescing(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        work = None
        try:
            work = original(*args, **kwargs)
        finally:
            communication.end_coalescing(work)
        return work

    return end_coalescing


def _wrap_blocking_call(
    communication: Communication, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Record the launches of a C++ function that waits for them itself."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        start_ns = monotonic_ns()
        try:
            return original(*args, **kwargs)
        finally:
            launches = communication.find_by_thread(threading.get_ident(), start_ns)
            if launches:
                communication.record_waits(launches, start_ns, monotonic_ns())

    return call


class BackwardWatch:
    """Records the wait of DDP at the end of a backward, inside C++.

    DDP's reducer launches its buckets from autograd nodes and waits for them in a callback that the
    engine runs last. At the first launch the watch queues a callback of its own. That one runs
    before DDP's, which is queued after the last launch, and queues another one, which runs after
    DDP's. The wait is between the two. A reducer that delays its launches (the first step of a
    static graph) launches in that callback and waits at once: then the wait is before the watch's
    callback.
    """

    def __init__(self, communication: Communication) -> None:
        self._communication = communication
        self._watched = NO_BACKWARD
        """Graph task whose end is watched; a task that raised never ends."""

    def watch_backward(self, launch: Launch) -> None:
        """Watch the end of this backward if an autograd node in C++ made the launch."""
        try:
            task = torch._C._current_graph_task_id()
            if task in (NO_BACKWARD, self._watched):
                return
            if not launched_by_engine(sys._getframe(1).f_back):
                return
            self._watched = task
            in_node = torch._C._current_autograd_node() is not None
            end = self._on_backward_end if in_node else self._on_delayed_end
            _queue(functools.partial(end, launch.thread_id, launch.start_ns))
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._communication.fail(problem)

    def _on_backward_end(self, thread_id: int, since_ns: int) -> None:
        start_ns = monotonic_ns()
        launches = self._communication.find_by_thread(thread_id, since_ns)
        if launches:
            self._communication.wait_begins(launches)
            try:
                _queue(functools.partial(self._on_ddp_end, launches, start_ns))
            except Exception as problem:  # noqa: BLE001 - promise 1: harmless
                self._communication.fail(problem)

    def _on_ddp_end(self, launches: Sequence[Launch], start_ns: int) -> None:
        self._communication.record_waits(launches, start_ns, monotonic_ns())

    def _on_delayed_end(self, thread_id: int, since_ns: int) -> None:
        end_ns = monotonic_ns()
        launches = self._communication.find_by_thread(thread_id, since_ns)
        if launches:
            self._communication.record_waits(launches, launches[-1].start_ns, end_ns)


def launched_by_engine(frame: FrameType | None) -> bool:
    """Return whether DDP's reducer, or a hook that it waits for, made the call in ``frame``.

    Modes of the job (``__torch_dispatch__``) may be in between. Other functions in Python (hooks of
    tensors, backwards, those of `torch.distributed`) wait in Python for what they launch.
    """
    outer: FrameType | None = None
    for _ in range(MAX_FRAMES):
        # None: a thread of the engine, without Python frames below.
        if frame is None or frame.f_code.co_name == ENGINE_FRAME:
            return outer is None or outer.f_code.co_name == MODE or _has_bucket(outer)
        file_name = frame.f_code.co_filename
        if DDP_HOOK_FILES in file_name:
            return True
        if not file_name.endswith(CALL_FILES):
            if DISTRIBUTED_FILES in file_name:
                return False
            if not file_name.startswith(TORCH_FILES):
                outer = frame
        frame = frame.f_back
    return False


def _has_bucket(frame: FrameType) -> bool:
    """Return whether ``frame`` is a hook of DDP's reducer, which it calls with a bucket."""
    bucket = dist.GradBucket  # type: ignore[attr-defined]  # its stub does not export it
    return any(isinstance(value, bucket) for value in frame.f_locals.values())


def is_called_by(frame: FrameType | None, code: CodeType) -> bool:
    """Return whether ``code`` runs in ``frame`` or in one of its nearest callers."""
    for _ in range(MAX_BATCH_FRAMES):
        if frame is None:
            return False
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _keys_after() -> Any:  # noqa: ANN401 - a DispatchKeySet
    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
