"""A span around each call of a function that is not ours."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..record.recorder import Recorder
    from ..span import SpanKind


def spanned(
    recorder: Recorder, name: str, kind: SpanKind, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``original`` with a span of each of its calls."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with recorder.host_span(name, kind):
            return original(*args, **kwargs)

    return call
