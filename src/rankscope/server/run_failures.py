"""Failures that concern one run: logged once, shown on its pages, and no other run waits for them.

A description or a span of one run may break whatever reads it. Every loop over runs therefore
catches what is raised for one of them, and goes on with the next.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rankscope.collector.errors import StoreClosedError, StoreError, describe_defect

from ..errors import find_exit_code, format_error
from ..terminal import lines as terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from rankscope.collector.store.store import Store

ANALYSED = "analysed"
ROLLED_UP = "rolled up"
WATCHED = "watched for alerts"
"""What is not done for a run; words of its log line."""


class RunFailures:
    """The failures of the runs of a store, as of now.

    Args:
        store: If it does not answer a trivial statement, its failure concerns all runs.
        say: Logs a line. None: `terminal.lines.say`.
    """

    def __init__(self, store: Store, *, say: Callable[[str], None] | None = None) -> None:
        self._store = store
        self._say = say or terminal.say
        self._lock = threading.Lock()
        self._texts: dict[tuple[str, str], str] = {}

    @contextmanager
    def catch(self, run_id: str, what: str) -> Iterator[Caught]:
        """Record what the block raises as a failure of the run; one that ends well clears it.

        Args:
            what: What is not done for it if the block fails: `ANALYSED`, for example.

        Yields:
            A record that has the error once the block has failed.

        Raises:
            StoreError: The store itself does not answer.
        """
        caught = Caught()
        try:
            yield caught
        except Exception as error:
            is_of_store = isinstance(error, StoreClosedError) or (
                isinstance(error, StoreError) and not self._does_store_answer()
            )
            if is_of_store:
                raise
            caught.error = error
            text = f"not {what}: {describe_failure(error)}"
            with self._lock:
                is_new = self._texts.get((run_id, what)) != text
                if isinstance(error, StoreError):  # it may be the same for every run
                    is_new = text not in self._texts.values()
                self._texts[run_id, what] = text
            if is_new:
                self._say(f"{run_id}: {text}")
        else:
            with self._lock:
                self._texts.pop((run_id, what), None)

    def of_run(self, run_id: str) -> tuple[str, ...]:
        """Return the failures of a run, one sentence each."""
        with self._lock:
            return tuple(text for (run, _), text in self._texts.items() if run == run_id)

    def keep_only(self, run_ids: Collection[str]) -> None:
        """Forget all other runs, because they are no longer in the store."""
        with self._lock:
            self._texts = {key: text for key, text in self._texts.items() if key[0] in run_ids}

    def _does_store_answer(self) -> bool:
        try:
            return bool(self._store.rows("SELECT 1 AS one"))
        except StoreError:
            return False


class Caught:
    """The error of a block, if it raised one."""

    def __init__(self) -> None:
        self.error: Exception | None = None


def raise_common(attempts: Sequence[Caught]) -> None:
    """Raise the failure of the store that the attempts of a turn, for several runs, all met.

    It concerns the store then, and no single run.
    """
    first = attempts[0].error if attempts else None
    is_common = len({str(attempt.error) for attempt in attempts}) == 1 and len(attempts) > 1
    if isinstance(first, StoreError) and is_common:
        raise first


def describe_failure(error: Exception) -> str:
    """Return one line about an error; of a defect, type and place only."""
    if find_exit_code(error) is not None:
        return format_error(error)
    return describe_defect(error)
