"""What a job hands over is written down without running the job's code."""

from __future__ import annotations

import json

from rankscope.tracer.record.exit_record import failed_record
from rankscope.tracer.record.plain_values import (
    MAX_ITEMS,
    MAX_TEXT,
    plain_copy,
    plain_int,
    plain_text,
)


class Liar:
    """Says nothing of its class but by raising."""

    @property  # type: ignore[misc] # nobody else's class does so
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


def test_a_number_too_long_for_python_to_write_out_is_told_by_its_length() -> None:
    assert plain_copy(2**63) == "9223372036854775808"
    assert plain_copy(-(1 << 50_000)) == "<int of 50001 bits>"


def test_what_is_no_exception_makes_an_exit_record_all_the_same() -> None:
    class Opaque:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    told = failed_record(Opaque(), 5)["exception"]  # type: ignore[arg-type]

    assert isinstance(told, dict)
    assert told["traceback"] == ""
    assert told["type"].endswith("Opaque")


def test_a_container_that_holds_itself_or_another_many_times_costs_no_more_than_any() -> None:
    within: list[object] = []
    within += [within] * 10  # 10 to the power of the depth
    many: object = 0
    for _ in range(4):
        many = [many] * 40
    texts = ["x" * MAX_TEXT] * MAX_ITEMS

    for value in (within, many, [texts, texts]):
        assert len(json.dumps(plain_copy(value))) < 2_000_000


def test_keys_are_text_that_can_be_stored_and_no_longer_than_values() -> None:
    told = plain_copy({"\ud800": 1, "k" * (MAX_TEXT + 1): 2, 3: 4})

    assert told == {"?": 1, "k" * MAX_TEXT: 2, "<int>": 4}
