"""Where batches come from and go: the time in a loader's ``next``, and what they hold."""

from __future__ import annotations

import functools
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from ..span import NONE, SpanKind
from .batch import Counts, count_batch, shape_of
from .guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..patches import Patches
    from ..record.recorder import Recorder

LOADER_MODULE = "torch.utils.data.dataloader"

MAX_WAITING = 64
"""Batches remembered between loader and model: more than any job fetches ahead."""


class Batches:
    """Follows batches from the loader, where their lengths can be read, to the model.

    The model may get a batch much later than it was fetched (prefetching), on a
    device, and cut into parts. So what was counted waits until a forward gets
    token ids of that shape.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._guard = Guard(recorder, "batch")
        self._waiting: deque[Counts] = deque(maxlen=MAX_WAITING)
        self._step = NONE
        self._next_index = 0
        self._counted: list[int | None] = []
        self._fetched: list[int | None] = []
        recorder.count_tokens = self.take_tokens

    def fetched(self, batch: object) -> None:
        """Note what a loader has just handed out."""
        self._guard.call(self._remember, batch)

    def forward_begins(self, batch: object, *, is_microbatch: bool) -> None:
        """Note that the root module gets a batch.

        Args:
            batch: Its arguments, a tuple, or its keyword arguments, a dict.
            is_microbatch: Whether it is a micro-batch: gradients are on.
        """
        if not self._guard.active:
            return
        try:
            counts = self._known_again(batch) if self._waiting else None
            if not is_microbatch:
                return
            if counts is None:
                counts = count_batch(batch)
            recorder = self._recorder
            if recorder.step_number != self._step:
                self._turn()
            index, self._next_index = self._next_index, self._next_index + 1
            self._counted.append(None if counts is None else counts.num_tokens)
            if counts is not None and not recorder.job_reports_microbatches:
                recorder.append_microbatch(index, counts.num_tokens, counts.sum_squared_lengths)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._guard.fail(problem)

    def take_tokens(self) -> int | None:
        """Return the tokens of the step so far and forget them; None where they are unknown.

        They are those of the forwards; where no forward was seen (a pipeline
        cuts batches itself), those that the loader handed out.
        """
        self._turn()
        tokens = self._counted or self._fetched
        self._counted, self._fetched = [], []
        return sum(tokens) if tokens and None not in tokens else None  # type: ignore[arg-type]

    def _remember(self, batch: object) -> None:
        self._turn()
        counts = count_batch(batch)
        if counts is not None:
            self._waiting.append(counts)
            self._fetched.append(counts.num_tokens)

    def _turn(self) -> None:
        """Forget what an earlier step held."""
        if self._recorder.step_number != self._step:
            self._step, self._next_index = self._recorder.step_number, 0
            self._counted, self._fetched = [], []

    def _known_again(self, batch: object) -> Counts | None:
        shape = shape_of(batch)
        for counts in self._waiting:
            if counts.shape == shape:
                while self._waiting.popleft() is not counts:
                    pass
                return counts
        return None


class OnFetch(Protocol):
    """Who is told of fetches."""

    def fetch_begins(self) -> None:
        """Hear that a loader is asked for a batch."""
        ...

    def fetched(self, batch: object) -> None:
        """Hear what it gave."""
        ...


def capture_loaders(recorder: Recorder, patches: Patches, on_fetch: OnFetch) -> None:
    """Make a span of each ``next`` and each ``iter`` of any `DataLoader`.

    The iterators of torchdata's ``StatefulDataLoader`` come through the same ``next``.

    Args:
        recorder: Where the spans go.
        patches: Where the replaced functions are noted.
        on_fetch: Told before each ``next``, and what it gave.
    """
    from torch.utils.data import dataloader

    patches.wrap(
        dataloader._BaseDataLoaderIter,
        "__next__",
        functools.partial(_traced_next, recorder, on_fetch),
    )
    patches.wrap(dataloader.DataLoader, "__iter__", functools.partial(_traced_iter, recorder))


def _traced_next(
    recorder: Recorder, on_fetch: OnFetch, original: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def call(iterator: Any) -> Any:  # noqa: ANN401
        on_fetch.fetch_begins()
        span = recorder.host_span("next batch", SpanKind.DATA)
        span.__enter__()
        try:
            batch = original(iterator)
        except StopIteration:
            span.__exit__(None, None, None)  # the end of the data is no error
            raise
        except BaseException:
            span.__exit__(*sys.exc_info())
            raise
        span.__exit__(None, None, None)
        on_fetch.fetched(batch)
        return batch

    return call


def _traced_iter(recorder: Recorder, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Record what starting the workers of a pass over the data takes."""

    @functools.wraps(original)
    def call(loader: Any) -> Any:  # noqa: ANN401
        with recorder.host_span("start loader", SpanKind.DATA):
            return original(loader)

    return call
