"""What a job hands over is written down without running the job's code."""

from __future__ import annotations

from tracer.exit_record import failed
from tracer.plain import plain, plain_int, plain_text


class Liar:
    """Says nothing of its class but by raising."""

    @property  # type: ignore[misc] # nobody else's class does so
    def __class__(self) -> type:
        raise KeyError("do not ask")


def test_an_object_whose_class_raises_is_named_by_its_type() -> None:
    liar = Liar()

    assert plain(liar) == "<Liar>"
    assert plain([liar, {"key": liar}]) == ["<Liar>", {"key": "<Liar>"}]
    assert plain_text(liar) is None
    assert plain_int(liar) is None


def test_subclasses_of_scalars_keep_their_value() -> None:
    class Text(str):
        __slots__ = ()

    class Number(int):
        pass

    class Real(float):
        pass

    assert plain([Text("a"), Number(3), Real(0.5), True, None]) == ["a", 3, 0.5, True, None]


def test_a_number_too_long_for_python_to_write_out_is_told_by_its_length() -> None:
    assert plain(2**63) == "9223372036854775808"
    assert plain(-(1 << 50_000)) == "<int of 50001 bits>"


def test_what_is_no_exception_makes_an_exit_record_all_the_same() -> None:
    class Opaque:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    told = failed(Opaque(), 5)["exception"]  # type: ignore[arg-type]

    assert isinstance(told, dict)
    assert told["traceback"] == ""
    assert told["type"].endswith("Opaque")
