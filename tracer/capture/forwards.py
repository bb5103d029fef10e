"""What the root module's forwards tell: which micro-batch, of how many tokens, of what model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .batch import shape_of
from .data import Batches
from .derived import Derivation
from .guard import Guard
from .root_module import RootFinder

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..record.recorder import Recorder
    from .derived_layout import Placing
    from .forward_backward import Compute
    from .steps import StepCounter


class Forwards:
    """Follows the root module, told or found, and the batches on their way to it."""

    def __init__(self, recorder: Recorder, steps: StepCounter, placing: Placing) -> None:
        self._recorder = recorder
        self._steps = steps
        self._guard = Guard(recorder, "forward")
        self._batches = Batches(recorder)
        self._derivation = Derivation(recorder)
        self._placing = placing
        self._finder: RootFinder | None = None

    def follow(self, compute: Compute, model: Any) -> None:  # noqa: ANN401 - a Module
        """Follow ``model``; None: the one that is found in time."""
        if model is not None:
            self.attach(compute, model)
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        finder = RootFinder(self._recorder, lambda found: self.attach(compute, found))
        self._finder = finder
        self._recorder.on_shutdown(register_optimizer_step_post_hook(finder.stepped).remove)

    def attach(self, compute: Compute, model: Any) -> Callable[[], None]:  # noqa: ANN401
        """Follow ``model``; return what lets it go again."""
        from .module import capture_forward

        take_off = capture_forward(compute, model, self._forward_begins)
        self._recorder.on_shutdown(take_off)
        return take_off

    def attach_chunk(self, compute: Compute, chunk: Any) -> None:  # noqa: ANN401 - a Module
        """Follow one of several model chunks of this rank."""
        self._derivation.is_whole = False
        self.attach(compute, chunk)

    def fetch_begins(self) -> None:
        """Note that a loader is asked for a batch."""
        self._steps.next_begins()
        if self._finder is not None:
            self._finder.next_begins()

    def fetched(self, batch: object) -> None:
        """Note the batch that it gave."""
        self._batches.fetched(batch)

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
                self._steps.next_begins()
            batch = kwargs if kwargs and shape_of(kwargs) is not None else args
            self._batches.forward_begins(batch, is_microbatch=is_microbatch)
            if is_microbatch and self._derivation.guard.active:
                self._placing.forward_begins(module)
                self._derivation.forward_begins(module, batch)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._guard.fail(problem)
