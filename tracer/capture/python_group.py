"""Communications of process groups written in Python, which bypass torch's dispatcher."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..native.host_launch import ASYNC
from .operation import Operation, find_operations

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from ..patches import Patches
    from .communication import Communication
    from .launch import Launch

    Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

METHODS = {
    "allreduce": "allreduce_",
    "allreduce_coalesced": "allreduce_coalesced_",
    "allgather": "allgather_",
    "allgather_coalesced": "allgather_coalesced_",
    "_allgather_base": "_allgather_base_",
    "all_gather_single": "_allgather_base_",
    "allgather_into_tensor_coalesced": "allgather_into_tensor_coalesced_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "reduce_scatter": "reduce_scatter_",
    "_reduce_scatter_base": "_reduce_scatter_base_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "gather": "gather_",
    "scatter": "scatter_",
    "alltoall": "alltoall_",
    "alltoall_base": "alltoall_base_",
    "all_to_all_single": "alltoall_base_",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier_",
    "send": "send",
    "recv": "recv_",
    "recv_anysource": "recv_any_source_",
}
"""Operator that each method of `torch.distributed.ProcessGroup` calls if it is not overridden."""

OPTIONS_ASYNC = "asyncOp"


class PythonGroups:
    """Captures the methods that subclasses of `torch.distributed.ProcessGroup` override.

    Torch calls such a method instead of its operator, also from C++. Launches of the method itself
    in the same thread are part of it and not recorded separately.
    """

    def __init__(
        self,
        communication: Communication,
        patches: Patches,
        *,
        wrap_wait: Wrap,
        before_launch: Callable[[FrameType | None], None],
        after_launch: Callable[[Launch], None],
    ) -> None:
        """Prepare the capture.

        Args:
            wrap_wait: Wraps the `wait` method of works that have their own.
            before_launch: Called with the caller's frame before each launch.
            after_launch: Called with each launch after it.
        """
        self._communication = communication
        self._patches = patches
        self._wrap_wait = wrap_wait
        self._before_launch = before_launch
        self._after_launch = after_launch
        self._operations = {one.op_name.removeprefix("c10d::"): one for one in find_operations()}
        self._seen: set[type] = {dist.ProcessGroup, dist.Work}

    def watch(self) -> None:
        """Capture the existing groups and those that torch will make."""
        for group in list(dist.distributed_c10d._world.pg_map):
            self._wrap_class(type(group))
        name = "_new_process_group_helper"
        if hasattr(dist.distributed_c10d, name):
            self._patches.wrap(dist.distributed_c10d, name, self._wrap_making)

    def _wrap_making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            made = original(*args, **kwargs)
            try:
                group = made[0]
                if isinstance(group, dist.ProcessGroup) and type(group) is not dist.ProcessGroup:
                    self._wrap_class(type(group))
                    arguments = signature.bind(*args, **kwargs).arguments
                    description = str(arguments.get("group_desc") or "undefined")
                    self._communication.groups.descriptions[group] = description
            except Exception as problem:  # noqa: BLE001 - promise 1: harmless
                self._communication.fail(problem)
            return made

        return make

    def _wrap_class(self, kind: type) -> None:
        """Wrap the methods that a class of groups or its bases override in Python."""
        for owner in kind.__mro__:
            if owner in self._seen or not issubclass(owner, dist.ProcessGroup):
                continue
            self._seen.add(owner)
            for name, op_name in METHODS.items():
                operation = self._operations.get(op_name)
                if operation is not None and inspect.isfunction(owner.__dict__.get(name)):
                    self._patches.wrap(owner, name, functools.partial(self._wrap_method, operation))

    def _wrap_method(
        self, operation: Operation, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        communication = self._communication

        @functools.wraps(original)
        def launch(group: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self._before_launch(sys._getframe().f_back)
            as_operator = self._convert_arguments(operation, group, [*args, *kwargs.values()])
            launch = communication.begin(operation, as_operator) if as_operator else None
            if launch is None:
                return original(group, *args, **kwargs)
            communication.thread.is_nested = True
            try:
                work = original(group, *args, **kwargs)
            except BaseException:
                communication.failed(launch)
                raise
            finally:
                communication.thread.is_nested = False
            communication.launched(launch, operation, as_operator, self._box_work(work))
            if not launch.flags & ASYNC:
                communication.thread.blocks_on = launch
            self._after_launch(launch)
            return work

        return launch

    def _convert_arguments(
        self,
        operation: Operation,
        group: Any,  # noqa: ANN401
        passed: list[Any],
    ) -> tuple[Any, ...]:
        """Return a method's arguments in the order of its operator; () if that is not possible."""
        try:
            at = operation.group_position
            # The operator of a barrier has a tensor argument that its method lacks.
            tensors = [None] * at if operation.is_empty else passed[:at]
            rest = [] if operation.is_empty else passed[at : at + 1]
            args = [*tensors, group.boxed(), *rest]
            if operation.async_position is not None:
                arguments = [one for one in passed if hasattr(one, OPTIONS_ASYNC)]
                args += [None] * (operation.async_position - len(args))
                args.append(getattr(arguments[0], OPTIONS_ASYNC) if arguments else True)
            return tuple(args)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._communication.fail(problem)
            return ()

    def _box_work(self, work: Any) -> Any:  # noqa: ANN401 - a pybind class
        """Return a work in the form that operators return, with its own `wait` method wrapped."""
        if not isinstance(work, dist.Work):
            return None
        try:
            for owner in type(work).__mro__:
                if owner not in self._seen and issubclass(owner, dist.Work):
                    self._seen.add(owner)
                    if "wait" in owner.__dict__:
                        self._patches.wrap(owner, "wait", self._wrap_wait)
            return work.boxed()
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._communication.fail(problem)
            return None
