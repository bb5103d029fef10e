from __future__ import annotations

import io
import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.collector.errors import StoreError
from rankscope.collector.store.store import Store
from rankscope.server.logs import Log, LogHandler, logged_to
from rankscope.terminal import lines as terminal
from rankscope.terminal.lines import printable
from tests.support.ports import fixed_port

TOKEN = "rst_0123456789ab_" + "A" * 43
OWN = "correct-horse-battery-staple"


def lines_of(*, as_json: bool, **fields: object) -> list[str]:
    stream = io.StringIO()
    Log(stream, as_json=as_json, secrets=[OWN]).tell("refused", fields)
    return stream.getvalue().splitlines()


def test_an_event_is_a_line_for_a_person_or_a_document_for_a_program() -> None:
    fields = {"reason": "no-token", "path": "/a b", "status": 401, "token_id": None}

    assert lines_of(as_json=False, **fields) == [
        'rankscope: refused reason=no-token path="/a b" status=401'
    ]
    (line,) = lines_of(as_json=True, **fields)
    document = json.loads(line)
    assert document.pop("at").endswith("+00:00")
    assert document == {"event": "refused", "reason": "no-token", "path": "/a b", "status": 401}


@settings(max_examples=200, deadline=None)
@given(text=st.text(), as_json=st.booleans())
def test_no_text_from_outside_makes_a_second_line_or_colours_a_terminal(
    text: str, *, as_json: bool
) -> None:
    hostile = f"{text}\r\n\x1b[31mrankscope: all is well\x1b[0m\u2028\u202e{text}"
    (line,) = lines_of(as_json=as_json, path=hostile)

    assert line.isprintable()


def test_what_can_be_seen_is_left_as_it_is() -> None:
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
def test_what_looks_like_a_secret_is_masked(text: str, shown: str) -> None:
    stream = io.StringIO()
    Log(stream, secrets=[OWN]).say(text)

    assert stream.getvalue() == f"rankscope: {shown}\n"


def test_what_libraries_log_is_one_event_with_where_it_failed() -> None:
    stream = io.StringIO()
    before = terminal.said_by(print)
    terminal.said_by(before)
    with logged_to(Log(stream, as_json=True, secrets=[OWN])):
        try:
            int(OWN)
        except ValueError:
            logging.getLogger("uvicorn.error").exception("Exception in\nASGI application")
        logging.getLogger("anything").info("not of interest")
        terminal.say("the tail\nfails")
    logging.getLogger("anything").debug("after the end")
    assert terminal.said_by(before) is before

    logged, said = map(json.loads, stream.getvalue().splitlines())
    assert logged["level"] == "error"
    assert logged["text"] == r"Exception in\nASGI application"
    assert logged["error"] == "ValueError"  # whose text holds what was sent
    assert OWN not in stream.getvalue()
    assert "test_logs.py:" in logged["where"]
    assert said["text"] == r"the tail\nfails"


def test_a_store_that_is_away_is_one_line_a_minute_without_its_address() -> None:
    # GIVEN a log, and nobody where the store's server should be
    now_s = [100.0]
    stream = io.StringIO()
    handler = LogHandler(Log(stream), monotonic_s=lambda: now_s[0])
    root = logging.getLogger()
    root.addHandler(handler)
    url = f"clickhouse://ann:{OWN}@127.0.0.1:{fixed_port()}/default"
    try:
        # WHEN it is asked five times in a minute, and once more
        for _ in range(5):
            with pytest.raises(StoreError):
                Store(url)
            now_s[0] += 14.0
        with pytest.raises(StoreError):
            Store(url)
    finally:
        root.removeHandler(handler)

    # THEN the first is told at once, and the others together
    assert stream.getvalue().splitlines() == [
        "rankscope: store-unreachable failed_tries=1",
        "rankscope: store-unreachable failed_tries=5",
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_there_are_as_many_lines_as_events_whatever_their_names(*, as_json: bool) -> None:
    hostile = [
        "a\r\nrankscope: fine",
        "\x1b[2J\x1b]0;x\x07",
        "=1+1",
        "\u2028\x85\x0b\x0c",
        "\0\ud800",
    ]
    stream = io.StringIO()
    log = Log(stream, as_json=as_json)
    with logged_to(log):
        for name in hostile:
            log.tell("refused", {"run": name, "host": name})
            log.say(name)
            terminal.say(name)
            logging.getLogger(name).warning(name)

    lines = stream.getvalue().split("\n")
    assert len(lines) == 4 * len(hostile) + 1
    assert all(line.isprintable() for line in lines)
    if as_json:
        assert all(json.loads(line)["at"] for line in lines[:-1])


def test_what_a_command_says_before_any_log_is_one_line_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal.say("rank\r\n\x1b[31m0")

    assert capsys.readouterr().err == "rankscope: rank\\r\\n\\x1b[31m0\n"
