from __future__ import annotations

import io
import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.collector.errors import StoreError
from rankscope.collector.store.store import Store
from rankscope.server.logs import Log, LogHandler, log_lines
from rankscope.terminal import lines as terminal
from rankscope.terminal.lines import printable
from tests.support.ports import fixed_port

TOKEN = "rst_0123456789ab_" + "A" * 43
OWN = "correct-horse-battery-staple"


def write_event(*, as_json: bool, **fields: object) -> list[str]:
    stream = io.StringIO()
    Log(stream, as_json=as_json, secrets=[OWN]).write_event("refused", fields)
    return stream.getvalue().splitlines()


def test_an_event_is_a_line_of_text_or_a_json_document() -> None:
    fields = {"reason": "no-token", "path": "/a b", "status": 401, "token_id": None}

    assert write_event(as_json=False, **fields) == [
        'rankscope: refused reason=no-token path="/a b" status=401'
    ]
    (line,) = write_event(as_json=True, **fields)
    document = json.loads(line)
    assert document.pop("at").endswith("+00:00")
    assert document == {"event": "refused", "reason": "no-token", "path": "/a b", "status": 401}


@settings(max_examples=200, deadline=None)
@given(text=st.text(), as_json=st.booleans())
def test_text_from_outside_cannot_add_a_line_or_colour_a_terminal(
    text: str, *, as_json: bool
) -> None:
    hostile = f"{text}\r\n\x1b[31mrankscope: all is well\x1b[0m\u2028\u202e{text}"
    (line,) = write_event(as_json=as_json, path=hostile)

    assert line.isprintable()


def test_only_invisible_characters_are_escaped() -> None:
    assert printable("größe 7 → 8, 😀") == "größe 7 → 8, 😀"
    assert printable("a\r\nb\x1b[0m\u202ec\ud800") == r"a\r\nb\x1b[0m\u202ec\ud800"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"Bearer {TOKEN}", "Bearer ***"),
        (f"token {TOKEN} is", "token rst_0123456789ab_*** is"),
        (f"/?token={OWN}x&run=a", "/?token=***&run=a"),
        (f"it is {OWN}.", "it is ***."),
        ("clickhouse://user:hunter2@host:8123/db", "clickhouse://user:***@host:8123/db"),
        ("Authorization: Basic dXNlcjpodW50ZXIy", "Authorization: Basic ***"),
        ("http://127.0.0.1:8050/run/a", "http://127.0.0.1:8050/run/a"),
    ],
)
def test_secrets_are_masked(text: str, shown: str) -> None:
    stream = io.StringIO()
    Log(stream, secrets=[OWN]).write_line(text)

    assert stream.getvalue() == f"rankscope: {shown}\n"


def test_a_record_of_a_library_is_one_event_with_the_place_of_the_error() -> None:
    stream = io.StringIO()
    before = terminal.redirect_lines(print)
    terminal.redirect_lines(before)
    with log_lines(Log(stream, as_json=True, secrets=[OWN])):
        try:
            int(OWN)
        except ValueError:
            logging.getLogger("uvicorn.error").exception("Exception in\nASGI application")
        logging.getLogger("anything").info("not of interest")
        terminal.say("the tail\nfails")
    logging.getLogger("anything").debug("after the end")
    assert terminal.redirect_lines(before) is before

    logged, line = map(json.loads, stream.getvalue().splitlines())
    assert logged["level"] == "error"
    assert logged["text"] == r"Exception in\nASGI application"
    assert logged["error"] == "ValueError"  # its text may contain data from a request
    assert OWN not in stream.getvalue()
    assert "test_logs.py:" in logged["where"]
    assert line["text"] == r"the tail\nfails"


def test_an_unreachable_store_is_one_line_per_minute_without_its_address() -> None:
    # GIVEN a log, and no server at the address of the store
    now_s = [100.0]
    stream = io.StringIO()
    handler = LogHandler(Log(stream), monotonic_s=lambda: now_s[0])
    root = logging.getLogger()
    root.addHandler(handler)
    url = f"clickhouse://ann:{OWN}@127.0.0.1:{fixed_port()}/default"
    try:
        # WHEN it is opened five times in a minute, and once more
        for _ in range(5):
            with pytest.raises(StoreError):
                Store(url)
            now_s[0] += 14.0
        with pytest.raises(StoreError):
            Store(url)
    finally:
        root.removeHandler(handler)

    # THEN the first failure is logged at once, and the others together
    assert stream.getvalue().splitlines() == [
        "rankscope: store-unreachable failed_tries=1",
        "rankscope: store-unreachable failed_tries=5",
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_each_event_is_one_line_whatever_its_fields_contain(*, as_json: bool) -> None:
    hostile = [
        "a\r\nrankscope: fine",
        "\x1b[2J\x1b]0;x\x07",
        "=1+1",
        "\u2028\x85\x0b\x0c",
        "\0\ud800",
    ]
    stream = io.StringIO()
    log = Log(stream, as_json=as_json)
    with log_lines(log):
        for name in hostile:
            log.write_event("refused", {"run": name, "host": name})
            log.write_line(name)
            terminal.say(name)
            logging.getLogger(name).warning(name)

    lines = stream.getvalue().split("\n")
    assert len(lines) == 4 * len(hostile) + 1
    assert all(line.isprintable() for line in lines)
    if as_json:
        assert all(json.loads(line)["at"] for line in lines[:-1])


def test_a_line_of_a_command_without_a_log_is_escaped_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal.say("rank\r\n\x1b[31m0")

    assert capsys.readouterr().err == "rankscope: rank\\r\\n\\x1b[31m0\n"
