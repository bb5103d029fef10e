"""Checkpoint saves: the time that they block the training, and the upload beside it."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from ..span import SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..patches import Patches
    from ..record.recorder import Recorder

DISTRIBUTED_MODULE = "torch.distributed.checkpoint.state_dict_saver"
"""Imported by jobs that use it; the tracer does not import it, which takes a second."""

SAFETENSORS_MODULE = "safetensors.torch"


class Saves:
    """Records a span of each outermost save; a save may call others, one per tensor."""

    def __init__(self, recorder: Recorder, patches: Patches) -> None:
        self._recorder = recorder
        self._patches = patches
        self._running: set[object] = set()

    def capture_torch(self) -> None:
        """Record each `torch.save`."""
        wrap = functools.partial(self._inner, "torch.save")
        self._patches.wrap(sys.modules["torch"], "save", wrap)

    def capture_distributed(self) -> None:
        """Record each `torch.distributed.checkpoint.save` and ``async_save``.

        The span of ``async_save`` is what the caller waits for. The upload is a span of the thread
        that makes it, and not recorded if a process makes it.
        """
        from torch.distributed.checkpoint import state_dict_saver

        for name in ("save", "async_save"):
            wrap = functools.partial(self._outer, f"checkpoint.{name}")
            self._patches.wrap(state_dict_saver, name, wrap)
        self._patches.replace_imported()

    def capture_safetensors(self) -> None:
        """Record each ``safetensors.torch.save_file``, with which Hugging Face saves models."""
        from safetensors import torch as safetensors_torch

        wrap = functools.partial(self._inner, "safetensors.save_file")
        self._patches.wrap(safetensors_torch, "save_file", wrap)
        self._patches.replace_imported()

    def _outer(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            mark = object()
            self._running.add(mark)
            try:
                with self._recorder.host_span(name, SpanKind.CHECKPOINT):
                    return original(*args, **kwargs)
            finally:
                self._running.discard(mark)

        return call

    def _inner(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        outer = self._outer(name, original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return (original if self._running else outer)(*args, **kwargs)

        return call
