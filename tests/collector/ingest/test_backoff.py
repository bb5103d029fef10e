from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import StoreError, StoreQueryError
from rankscope.collector.ingest.backoff import BusyError, StoreBackoff, is_row_error

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("error", "is_of_rows"),
    [
        (StoreQueryError("type mismatch", code=53), True),
        (StoreQueryError("too many parts", code=252), False),
        (StoreQueryError("memory", code=241), False),
        (StoreQueryError("a number of a later version", code=4711), False),
        (StoreQueryError("no answer"), False),
        (StoreError("closed"), False),
        (OSError("no space left on device"), False),
        (ValueError("a bug of ours"), True),
    ],
    ids=str,
)
def test_errors_caused_by_rows_and_by_the_store(error: Exception, *, is_of_rows: bool) -> None:
    assert is_row_error(error) == is_of_rows


def test_one_request_passes_after_each_pause_while_the_store_fails() -> None:
    now_s = [0.0]
    backoff = StoreBackoff(lambda: now_s[0], say=lambda _: None)
    pauses = []
    for _ in range(6):
        pauses.append(backoff.failed(StoreError("no")).retry_after_s)
        with pytest.raises(BusyError):
            backoff.check()
        now_s[0] += pauses[-1]
        backoff.check()  # this one may try ...
        second: Callable[[], None] = backoff.check
        with pytest.raises(BusyError):
            second()  # ... and no other

    assert pauses == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    backoff.succeeded()
    backoff.check()
