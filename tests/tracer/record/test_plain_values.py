"""Plain copies of a job's values, without running the job's code."""

from __future__ import annotations

import json

from rankscope.tracer.record.exit_record import MAX_CAUSES, MAX_CONTEXT, MAX_MESSAGE, failed_record
from rankscope.tracer.record.plain_values import (
    MAX_ITEMS,
    MAX_TEXT,
    plain_copy,
    plain_int,
    plain_text,
)


class Liar:
    """An object whose ``__class__`` raises."""

    @property  # type: ignore[misc] # no other class does this
    def __class__(self) -> type:
        raise KeyError("do not ask")


def test_an_object_whose_class_raises_is_named_by_its_type() -> None:
    liar = Liar()

    assert plain_copy(liar) == "<Liar>"
    assert plain_copy([liar, {"key": liar}]) == ["<Liar>", {"key": "<Liar>"}]
    assert plain_text(liar) is None
    assert plain_int(liar) is None


def test_subclasses_of_scalars_keep_their_value() -> None:
    class Text(str):
        __slots__ = ()

    class Number(int):
        pass

    class Real(float):
        pass

    assert plain_copy([Text("a"), Number(3), Real(0.5), True, None]) == ["a", 3, 0.5, True, None]


def test_a_number_too_long_for_python_to_print_is_described_by_its_size() -> None:
    assert plain_copy(2**63) == "9223372036854775808"
    assert plain_copy(-(1 << 50_000)) == "<int of 50001 bits>"


def test_an_object_that_is_not_an_exception_gives_an_exit_record_too() -> None:
    class Opaque:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    exception = failed_record(Opaque(), 5)["exception"]  # type: ignore[arg-type]

    assert isinstance(exception, dict)
    assert exception["traceback"] == ""
    assert exception["type"].endswith("Opaque")


def test_an_exit_record_has_the_messages_of_the_causes() -> None:
    lost = RuntimeError("Connection closed by peer [10.0.0.3]:2345")
    wrapped = RuntimeError("[Stage 1] failed to run forward:\nargs: ...")
    wrapped.__cause__ = lost
    lost.__cause__ = wrapped  # a job can build a cycle

    exception = failed_record(wrapped, 5)["exception"]

    assert isinstance(exception, dict)
    assert exception["message"].startswith(
        "[Stage 1] failed to run forward:\nargs: ...\n"
        "caused by RuntimeError: Connection closed by peer [10.0.0.3]:2345\n"
    )
    assert len(exception["message"]) <= MAX_MESSAGE


def test_an_exit_record_has_the_exceptions_in_whose_handlers_the_last_one_was_raised() -> None:
    first = ValueError("bad sample 4711" + "!" * MAX_CONTEXT)
    wrapped, last = KeyError("shard"), RuntimeError("timed out")
    wrapped.__cause__ = first
    last.__context__ = wrapped
    first.__context__ = OSError(5, "read error")

    exception = failed_record(last, 5)["exception"]
    hidden = RuntimeError("from None")
    hidden.__context__, hidden.__suppress_context__ = first, True
    alone = failed_record(hidden, 5)["exception"]

    assert isinstance(exception, dict)
    assert isinstance(alone, dict)
    assert exception["contexts"] == [
        {"type": "KeyError", "message": "'shard'"},
        {"type": "OSError", "message": "[Errno 5] read error"},
    ]
    assert alone["contexts"] == []


def of_ranks(failures: object) -> object:
    error = RuntimeError("failed")
    error.worker_failures = failures  # type: ignore[attr-defined]
    exception = failed_record(error, 5)["exception"]
    assert isinstance(exception, dict)
    return exception["of_ranks"]


def test_what_ended_the_ranks_of_a_driver_is_kept_by_rank() -> None:
    wrapped = Exception("Traceback (most recent call last):\n  ...\nvalue.Bad: no 17: it is\n")

    assert of_ranks({1: KeyError("x"), 2: wrapped, "3": KeyError("y"), 4: "text"}) == [
        {"rank": 1, "type": "KeyError", "message": "'x'"},
        {"rank": 2, "type": "value.Bad", "message": "no 17: it is"},
    ]
    assert of_ranks([1, 2]) == []


def test_a_cycle_of_contexts_ends() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one

    exception = failed_record(one, 5)["exception"]

    assert isinstance(exception, dict)
    assert len(exception["contexts"]) == MAX_CAUSES


def test_a_recursive_or_shared_container_costs_no_more_than_any_other() -> None:
    within: list[object] = []
    within += [within] * 10  # 10 to the power of the depth items
    many: object = 0
    for _ in range(4):
        many = [many] * 40
    texts = ["x" * MAX_TEXT] * MAX_ITEMS

    for value in (within, many, [texts, texts]):
        assert len(json.dumps(plain_copy(value))) < 2_000_000


def test_keys_become_storable_text_of_bounded_length() -> None:
    copy = plain_copy({"\ud800": 1, "k" * (MAX_TEXT + 1): 2, 3: 4})

    assert copy == {"?": 1, "k" * MAX_TEXT: 2, "<int>": 4}
