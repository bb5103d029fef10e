"""The root module: finding it, following its forwards, and describing the model."""

from __future__ import annotations

import functools
import gc
import os
import sys
from typing import TYPE_CHECKING, Any

from ..job.counted_flops import COUNT_VARIABLE, FlopCount
from ..job.decoder import UnknownFlopsError
from ..job.flops import compute_dtype, find_window, model_flops, read_shape_of_layers
from ..job.graph_flops import FirstStep
from ..job.manifest import add_derived, count_parameters, read_device
from ..job.model_memory import read_device_memory, state_bytes
from .data import Batches, batch_of, read_shape
from .guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..record.recorder import Recorder
    from .derived_layout import LayoutDerivation
    from .forward_backward import ComputeCapture
    from .optimizer import StepCounter

TRIES_BEFORE_A_STEP = 2
"""Each try visits every object of the process, which takes 0.15 s for a million objects."""


class RootForwards:
    """Follows the root module, declared or found, and the batches on their way to it."""

    def __init__(
        self, recorder: Recorder, steps: StepCounter, layout_derivation: LayoutDerivation
    ) -> None:
        self._recorder = recorder
        self._steps = steps
        self._guard = Guard(recorder, "forward")
        self._batches = Batches(recorder)
        self._model_description = ModelDescription(recorder, self._batches)
        self._layout_derivation = layout_derivation
        self._finder: RootFinder | None = None

    def follow_model(
        self,
        compute: ComputeCapture,
        model: Any,  # noqa: ANN401 - a Module
        *,
        from_start: bool,
    ) -> None:
        """Follow ``model``; if None, the module that will be found.

        Args:
            model: The root module, if the job declared it.
            from_start: Whether the first step is recorded.
        """
        self._model_description.follow(compute)
        if model is not None:
            self.attach(compute, model)
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        finder = RootFinder(self._recorder, functools.partial(self._attach_found, compute))
        self._finder = finder
        self._recorder.on_shutdown(
            register_optimizer_step_post_hook(finder.on_optimizer_step).remove
        )
        if from_start:
            finder.watch_forwards()
            self._recorder.on_shutdown(finder.stop_watching)

    def attach(self, compute: ComputeCapture, model: Any) -> Callable[[], None]:  # noqa: ANN401
        """Follow ``model`` until the returned function is called."""
        from .forward_backward import capture_forward

        stop = capture_forward(compute, model, self._forward_begins)
        self._recorder.on_shutdown(stop)
        return stop

    def _attach_found(
        self,
        compute: ComputeCapture,
        root: Any,  # noqa: ANN401 - a Module
        others: list[Any],
    ) -> Callable[[], None]:
        """Follow the root module and others of the job until the returned function is called."""
        from .forward_backward import capture_forward, parts_to_follow

        stops = [self.attach(compute, root)]
        for module in parts_to_follow(root, others):
            stops.append(capture_forward(compute, module, self._other_begins, is_root=False))
            self._recorder.on_shutdown(stops[-1])

        def stop() -> None:
            for stop_one in stops:
                stop_one()

        return stop

    def attach_chunk(self, compute: ComputeCapture, chunk: Any) -> None:  # noqa: ANN401 - a Module
        """Follow one of several model chunks of this rank."""
        self._model_description.is_whole_model = False
        self.attach(compute, chunk)

    def function_compiles(self) -> None:
        """Handle a call of `torch.compile` for something that is no module."""
        if self._finder is not None:
            self._finder.stop_watching()

    def fetch_begins(self) -> None:
        """Handle a request for a batch."""
        self._steps.on_next_work()
        if self._finder is not None:
            self._finder.on_next_work()

    def fetched(self, batch: object) -> None:
        """Handle the batch that the loader returned."""
        self._batches.fetched(batch)

    def _other_begins(self, *call: object, is_microbatch: bool) -> None:
        if self._guard.active and self._steps.is_due:
            self._guard.call(self._steps.on_next_work)

    def _forward_begins(
        self,
        module: Any,  # noqa: ANN401
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_microbatch: bool,
    ) -> None:
        if not self._guard.active:
            return
        try:
            if self._steps.is_due:
                self._steps.on_next_work()
            if is_microbatch and self._model_description.is_first_forward:
                self._batches.window = find_window(module)
            self._batches.forward_begins(args, kwargs, is_microbatch=is_microbatch)
            if is_microbatch and self._model_description.guard.active:
                self._layout_derivation.forward_begins(module)
                self._model_description.forward_begins(module, batch_of(args, kwargs))
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._guard.fail(problem)


class RootFinder:
    """Looks for the model at the first batches or the first forward, follows and checks it.

    Most scripts have built, wrapped and compiled the model and made the optimizer by then. The
    first optimizer that steps decides: a model that it does not train was the wrong one.
    """

    def __init__(
        self, recorder: Recorder, attach: Callable[[Any, list[Any]], Callable[[], None]]
    ) -> None:
        """Prepare the search; ``attach`` follows a root module and the other outermost ones."""
        self._guard = Guard(recorder, "root module")
        self._attach = attach
        self._root: Any = None
        self._leave_root: Callable[[], None] | None = None
        self._tries_left = TRIES_BEFORE_A_STEP
        self._end_watch: Callable[[], None] | None = None

    def watch_forwards(self) -> None:
        """Search at the first forward of any module too: a script may have no loader.

        A compiled function would be compiled again after `stop_watching`, so that must come first.
        A compiled module is called first.
        """
        from .module_calls import watch_calls

        self._end_watch = watch_calls(self._on_call)

    def stop_watching(self) -> None:
        """Search at no forward from now on."""
        end, self._end_watch = self._end_watch, None
        if end is not None:
            end()

    def on_next_work(self) -> None:
        """Search now, if tries are left."""
        if self._guard.active and self._tries_left > 0:
            self._tries_left -= 1
            self._guard.call(self._find)

    def on_optimizer_step(self, optimizer: Any, *about: object) -> None:  # noqa: ANN401
        """Search for the last time: ``optimizer`` has stepped."""
        if self._guard.active:
            self._guard.call(self._check, optimizer)
            self._guard.active = False
            self._root = None

    def _on_call(self) -> None:
        if self._end_watch is not None:
            self.stop_watching()
            if self._root is None:
                self._guard.call(self._find)

    def _find(self) -> None:
        self._attach_root(*find_root())

    def _check(self, optimizer: Any) -> None:  # noqa: ANN401
        self.stop_watching()
        if self._root is not None:
            trained = trained_parameter_ids(optimizer)
            if any(id(parameter) in trained for parameter in self._root.parameters()):
                return
        if self._leave_root is not None:
            self._leave_root()
        self._attach_root(*find_root(optimizer))

    def _attach_root(self, root: Any, others: list[Any]) -> None:  # noqa: ANN401
        self._root = root
        if root is not None:
            self._tries_left = 0
            self.stop_watching()
            self._leave_root = self._attach(root, others)


def find_root(optimizer: Any = None) -> tuple[Any | None, list[Any]]:  # noqa: ANN401 - a Module
    """Return the outermost module with the most trained parameters, and the other outermost ones.

    The former is None if there is none, and of the latter those without parameters are left out.

    If none has a parameter of the optimizer, it trains copies (DeepSpeed's ZeRO, weights of higher
    precision): then the parameters that require a gradient count. So they do if there is none: it
    is made later, or the job has its own.

    Args:
        optimizer: The optimizer whose parameters count; if None, those of all optimizers.
    """
    torch = sys.modules["torch"]
    objects = gc.get_objects()
    # There may be millions of objects but only hundreds of types: call `issubclass` for the types
    # only.
    kinds = set(map(type, objects))
    optimizer_kinds = {kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)}
    module_kinds = {kind for kind in kinds if issubclass(kind, torch.nn.Module)}
    wanted = module_kinds | optimizer_kinds
    instances = [thing for thing in objects if type(thing) in wanted]
    del objects
    modules = [it for it in instances if type(it) in module_kinds and "_modules" in it.__dict__]
    optimizers = [it for it in instances if type(it) in optimizer_kinds]
    if optimizer is not None:
        optimizers = [optimizer]
    trained = set().union(*map(trained_parameter_ids, optimizers))
    parts = {id(part) for module in modules for part in module._modules.values()}
    outermost = [module for module in modules if id(module) not in parts]
    best = _with_most(outermost, lambda parameter: id(parameter) in trained)
    if best is None and (trained or not optimizers):
        best = _with_most(outermost, lambda parameter: parameter.requires_grad)
    others = [it for it in outermost if it is not best and any(True for _ in it.parameters())]
    return best, others


def _with_most(modules: list[Any], counts: Callable[[Any], bool]) -> Any | None:  # noqa: ANN401
    nums = [sum(map(counts, module.parameters())) for module in modules]
    most = max(nums, default=0)
    return modules[nums.index(most)] if most else None


def trained_parameter_ids(optimizer: Any) -> set[int]:  # noqa: ANN401
    """Return the `id` of each parameter of an optimizer."""
    groups = optimizer.__dict__.get("param_groups", ())
    return {id(parameter) for group in groups for parameter in group["params"]}


class ModelDescription:
    """Reads model and device once, in the first step, when both are in their final form.

    It derives the inputs of MFU that the job did not declare.
    """

    def __init__(self, recorder: Recorder, batches: Batches) -> None:
        self._recorder = recorder
        self._batches = batches
        self.guard = Guard(recorder, "model description")
        """Active until the step of the first forward has ended."""

        self.is_whole_model = True
        """Whether the module is all of the model on this rank, not one chunk of several."""

        self._compute: ComputeCapture | None = None
        self._step_number: int | None = None
        self._step = FirstStep()
        self._count = FlopCount() if os.environ.get(COUNT_VARIABLE) == "1" else None
        self._noted: tuple[Any, dict[str, object]] | None = None
        self._model: Any = None
        """The model while its FLOPs are those of the first step, which has not ended."""

        self._optimizers: dict[int, Any] = {}
        self._state: Any = None
        """The model once the first step has ended and its optimizer has a state."""

        recorder.on_tick(self._write)

    @property
    def is_first_forward(self) -> bool:
        """Return whether no forward was noted yet."""
        return self._step_number is None

    def follow(self, compute: ComputeCapture) -> None:
        """Read the graph of the first backward."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._compute, compute.on_backward = compute, self._backward_begins
        self._end_hook = register_optimizer_step_post_hook(self._optimizer_steps).remove
        self._recorder.on_shutdown(self._end_hook)

    def _optimizer_steps(self, optimizer: Any, *about: object) -> None:  # noqa: ANN401
        if self.guard.active:
            self._optimizers[id(optimizer)] = optimizer

    def forward_begins(self, model: Any, batch: object) -> None:  # noqa: ANN401 - a Module
        """Note a forward of ``model``; ignore those after the first step."""
        self.guard.call(self._note, model, batch)

    def _note(self, model: Any, batch: object) -> None:  # noqa: ANN401
        step = self._recorder.step_number
        if self._step_number is None:
            # Only what depends on this thread and moment; the background thread reads the rest.
            self._noted = model, {**read_device(), "dtype": compute_dtype(model)}
            self._step_number = step
            if self._count is not None:
                text = "counts FLOPs in this step, which makes it slow"
                self._recorder.event("tracer", text, {"step": step})
        if step == self._step_number:
            self._step.forward_begins(read_shape(batch))
            if self._count is not None:
                self._count.count_forward(model)
            return
        self.guard.active = False
        if self._compute is not None:
            self._compute.on_backward = None
            self._end_hook()
        self._state = model, read_device_memory()

    def _backward_begins(
        self, backward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any]:
        if self._recorder.step_number != self._step_number or not self.guard.active:
            return backward
        self.guard.call(self._read_graph, args[0] if args else kwargs.get("tensors"))
        return backward if self._count is None else self._count.count_backward(backward)

    def _read_graph(self, roots: Any) -> None:  # noqa: ANN401 - tensors, as the job passes them
        self._step.backward_begins(roots if isinstance(roots, list | tuple) else (roots,))

    def _write(self) -> None:
        waiting, self._noted = self._noted, None
        if waiting is not None:
            model, derived = waiting
            if self.is_whole_model:
                derived["num_parameters"] = count_parameters(model)
                try:
                    derived |= model_flops(model).derived()
                except UnknownFlopsError as reason:
                    derived["unknown_flops"] = str(reason)
                    self._model = model
            self._add(derived)
        if self._model is not None and self._step_number != self._recorder.step_number:
            model, self._model = self._model, None
            flops = self._step.flops(model)
            if flops is None and self._count is not None:
                flops = self._count.flops(self._step.all_shapes)
            if flops is not None:
                self._add(flops.derived())
        ended, self._state = self._state, None
        if ended is not None:
            model, memory = ended
            optimizers, self._optimizers = self._optimizers, {}
            if self.is_whole_model:
                memory |= state_bytes(model, optimizers.values())
            self._add({"memory": memory, "shape": read_shape_of_layers(model)})

    def _add(self, derived: dict[str, object]) -> None:
        values = {key: value for key, value in derived.items() if value not in (None, "", {})}
        if values:
            add_derived(self._recorder.folder, values)
