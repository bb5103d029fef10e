from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from collector.access import GRANT_KEY, UNAUTHORIZED, WRONG_ROLE, Access, AccessGate
from collector.clock_probe import parse_reply
from collector.errors import TokenFileError, TokenRequestError
from collector.route_roles import ROUTE_RULES
from collector.server import create_app, create_server
from collector.token_file import (
    OwnToken,
    TokenBook,
    default_tokens_path,
    held_tokens,
    read_own_token,
    read_tokens,
    write_private,
    write_tokens,
)
from collector.tokens import Grant, Role, TokenSet, TokenState, hash_of, make_token, revoked
from tests.collector.asgi import Client, in_a_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from collector.access import AsgiApp, Message, Scope
    from collector.tokens import TokenRecord

NOW_NS = 1_700_000_000 * 10**9
DAY_NS = 86_400 * 10**9
OWN = "correct-horse"
OPEN = {"/healthz", "/readyz", "/login"}


def made(
    role: Role = Role.INGEST, *, run_prefix: str = "", days: int = 7, holder: str = "agent"
) -> tuple[str, TokenRecord]:
    return make_token([], role=role, run_prefix=run_prefix, holder=holder, days=days, now_ns=NOW_NS)


def test_a_new_token_opens_what_it_was_made_for_until_its_day() -> None:
    token, record = made(Role.INGEST, run_prefix="llama-", days=7)
    tokens = TokenSet([record])

    assert tokens.grant(token, now_ns=NOW_NS) == Grant(
        role=Role.INGEST, run_prefix="llama-", token_id=record.token_id, holder="agent"
    )
    assert tokens.grant(token, now_ns=NOW_NS + 7 * DAY_NS - 1) is not None
    assert tokens.grant(token, now_ns=NOW_NS + 7 * DAY_NS) is None
    assert record.state(NOW_NS + 7 * DAY_NS) is TokenState.EXPIRED


def test_nothing_of_the_secret_is_kept() -> None:
    token, record = made()

    secret = token.removeprefix(f"rst_{record.token_id}_")
    kept = json.dumps(record.document()) + repr(record)
    assert token not in kept
    assert secret not in kept
    assert record.hash_hex == hash_of(token)
    assert len(secret) == 43  # 32 random bytes in base64


def test_two_tokens_are_never_alike() -> None:
    assert len({made()[0] for _ in range(100)}) == 100


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=200))
def test_no_text_opens_anything_or_breaks_the_check(text: str) -> None:
    token, record = made()
    tokens = TokenSet([record])

    assert tokens.grant(text, now_ns=NOW_NS) is None
    assert tokens.grant(token + text, now_ns=NOW_NS) is None or not text


def test_a_token_with_any_letter_changed_cut_or_added_opens_nothing() -> None:
    token, record = made()
    tokens = TokenSet([record])

    for index, letter in enumerate(token):
        other = "A" if letter != "A" else "B"
        assert tokens.grant(token[:index] + other + token[index + 1 :], now_ns=NOW_NS) is None
        assert tokens.grant(token[:index], now_ns=NOW_NS) is None
    assert tokens.grant(token + "\n", now_ns=NOW_NS) is None
    assert tokens.grant("x" * 1_000_000, now_ns=NOW_NS) is None


def test_a_holder_has_two_live_tokens_at_most_so_that_one_can_follow_the_other() -> None:
    # GIVEN two live ones
    records = [made()[1], made()[1]]
    fields = {"role": Role.INGEST, "run_prefix": "", "holder": "agent", "days": 7}

    # WHEN a third is asked for, THEN it is refused, naming both
    with pytest.raises(TokenRequestError, match=records[0].token_id):
        make_token(records, **fields, now_ns=NOW_NS)  # type: ignore[arg-type]

    # AND it is made once one is revoked or expired, for another holder, scope or role
    left = revoked(records, records[0].token_id, now_ns=NOW_NS)
    make_token(left, **fields, now_ns=NOW_NS)  # type: ignore[arg-type]
    make_token(records, **fields, now_ns=NOW_NS + 7 * DAY_NS)  # type: ignore[arg-type]
    for change in ({"holder": "b"}, {"run_prefix": "x"}, {"role": Role.READ}):
        make_token(records, **{**fields, **change}, now_ns=NOW_NS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run_prefix": "../etc"}, "run prefix"),
        ({"run_prefix": "a" * 129}, "run prefix"),
        ({"run_prefix": "a\n"}, "run prefix"),
        ({"holder": ""}, "holder"),
        ({"holder": "a b"}, "holder"),
        ({"days": 0}, "1 to 3650 days, not 0"),
        ({"days": 3651}, "not 3651"),
    ],
)
def test_a_field_of_another_form_is_refused(change: dict[str, object], reason: str) -> None:
    fields = {"role": Role.READ, "run_prefix": "", "holder": "a", "days": 1, **change}

    with pytest.raises(TokenRequestError, match=reason):
        make_token([], **fields, now_ns=NOW_NS)  # type: ignore[arg-type]


def test_a_revoked_token_opens_nothing_and_stays_revoked_since_then() -> None:
    token, record = made()
    once = revoked([record], record.token_id, now_ns=NOW_NS + 5)
    twice = revoked(once, record.token_id, now_ns=NOW_NS + 9)

    assert TokenSet(once).grant(token, now_ns=NOW_NS + 6) is None
    assert once[0].state(NOW_NS) is TokenState.REVOKED
    assert twice[0].revoked_ns == NOW_NS + 5
    with pytest.raises(TokenRequestError, match="no token has the id 'none'"):
        revoked([record], "none", now_ns=NOW_NS)


# The file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def test_what_is_written_is_read_and_only_its_owner_can(path: Path) -> None:
    record = made(Role.READ, run_prefix="a")[1]
    write_tokens(path, [record])

    assert read_tokens(path) == [record]
    assert path.stat().st_mode & 0o777 == 0o600
    assert [found.name for found in path.parent.iterdir()] == ["tokens.json"]


def test_no_file_is_no_tokens(path: Path) -> None:
    assert read_tokens(path) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o666])
def test_a_file_open_to_others_is_refused(path: Path, mode: int) -> None:
    write_tokens(path, [made()[1]])
    path.chmod(mode)

    with pytest.raises(TokenFileError, match=f"mode {mode:04o}.: chmod 600"):
        read_tokens(path)


def test_a_link_a_folder_and_a_pipe_are_refused(path: Path) -> None:
    real = path.with_name("real.json")
    write_tokens(real, [made()[1]])
    path.symlink_to(real)
    with pytest.raises(TokenFileError, match="can't be opened"):
        read_tokens(path)
    path.unlink()
    path.mkdir(mode=0o700)
    with pytest.raises(TokenFileError, match="no plain file"):
        read_tokens(path)
    path.rmdir()
    os.mkfifo(path, 0o600)
    with pytest.raises(TokenFileError, match="no plain file"):
        read_tokens(path)


GOOD = made()[1].document()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"version": 1}',
        b'{"version": 1, "tokens": [{}]}',
        b'{"version": 1, "tokens": 7}',
        b"[" * 100_000,
        json.dumps({"version": 1, "tokens": [{**GOOD, "role": "root"}]}).encode(),
        json.dumps({"version": 1, "tokens": [{**GOOD, "hash_hex": "é" * 64}]}).encode(),
        json.dumps({"version": 1, "tokens": [{**GOOD, "hash_hex": ""}]}).encode(),
        json.dumps({"version": 1, "tokens": [{**GOOD, "expires_ns": "never"}]}).encode(),
        json.dumps({"version": 1, "tokens": [{**GOOD, "run_prefix": None}]}).encode(),
        json.dumps({"version": 1, "tokens": [{**GOOD, "more": 1}]}).encode(),
    ],
)
def test_a_broken_file_is_refused_as_a_whole_and_opens_nothing(path: Path, content: bytes) -> None:
    write_private(path, content)

    with pytest.raises(TokenFileError, match="not of the form"):
        read_tokens(path)
    book = TokenBook(path)
    assert book.problem is not None
    assert book.grant(made()[0]) is None


def test_a_file_of_a_newer_form_is_refused_naming_both(path: Path) -> None:
    write_private(path, b'{"version": 2, "tokens": []}')

    with pytest.raises(TokenFileError, match="form 2, known is 1"):
        read_tokens(path)


def test_a_change_that_fails_leaves_the_file_as_it_was(path: Path) -> None:
    write_tokens(path, [made()[1]])
    before = path.read_bytes()

    def change() -> None:
        with held_tokens(path) as records:
            records.clear()
            revoked(records, "none", now_ns=NOW_NS)

    with pytest.raises(TokenRequestError):
        change()

    assert path.read_bytes() == before


def test_commands_at_once_lose_none_of_each_others_tokens(path: Path) -> None:
    def add() -> None:
        for _ in range(5):
            with held_tokens(path) as records:
                records.append(made()[1])

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(read_tokens(path)) == 20


def test_the_server_follows_the_file_without_a_restart(path: Path) -> None:
    # GIVEN a server that started before there was any token
    book = TokenBook(path, unix_ns=lambda: NOW_NS)
    token, record = made()
    assert book.grant(token) is None
    # WHEN one is made THEN it opens; revoked, it no longer does
    write_tokens(path, [record])
    assert book.grant(token) is not None
    write_tokens(path, revoked([record], record.token_id, now_ns=NOW_NS))
    assert book.grant(token) is None
    # AND a file opened to others opens nothing until that is mended
    write_tokens(path, [record])
    path.chmod(0o644)
    assert book.grant(token) is None
    assert book.problem is not None
    path.chmod(0o600)
    assert book.grant(token) is not None
    assert book.problem is None


def test_the_file_is_where_the_environment_says(tmp_path: Path) -> None:
    assert default_tokens_path({"RANKSCOPE_TOKENS": "/etc/x.json"}).as_posix() == "/etc/x.json"
    found = default_tokens_path({"XDG_DATA_HOME": str(tmp_path)})
    assert found == tmp_path / "rankscope" / "tokens.json"


# A client's own token


def test_a_client_takes_its_token_from_the_environment_or_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    write_private(file, b"rst_from_file\n")

    assert read_own_token({}) is None
    assert read_own_token({"RANKSCOPE_TOKEN": " rst_a\n"}) == OwnToken("rst_a")
    both = {"RANKSCOPE_TOKEN": "rst_a", "RANKSCOPE_TOKEN_FILE": str(file)}
    assert read_own_token(both) == OwnToken("rst_from_file")
    # Rotation: the file is read anew.
    write_private(file, b"rst_next\n")
    assert read_own_token(both) == OwnToken("rst_next")


def test_a_clients_file_that_is_open_missing_or_empty_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    environment = {"RANKSCOPE_TOKEN_FILE": str(file)}
    with pytest.raises(TokenFileError, match="is not there"):
        read_own_token(environment)
    for content in (b"", b"\n", b"two words", b"\xff", b"a\nb", b"x" * 5_000):
        write_private(file, content)
        with pytest.raises(TokenFileError):
            read_own_token(environment)
    write_private(file, b"secret-of-ours")
    file.chmod(0o644)
    with pytest.raises(TokenFileError, match="chmod 600") as caught:
        read_own_token(environment)
    assert "secret-of-ours" not in str(caught.value)


def test_a_clients_token_does_not_show_when_printed() -> None:
    assert "rst_a" not in f"{OwnToken('rst_a')!r} {OwnToken('rst_a')}"
    assert OwnToken("rst_a").header() == "Bearer rst_a"


# The gate


def pages(environ: dict[str, str], start_response: Callable[..., object]) -> Iterable[bytes]:
    """A dashboard that shows all runs on every path."""
    start_response("200 OK", [("Content-Type", "text/html")])
    return [f"data of {environ['PATH_INFO']}".encode()]


class Doors:
    """A server with one token of each sort."""

    def __init__(self, path: Path) -> None:
        self.tokens = {"none": "", "own": OWN}
        records: list[TokenRecord] = []
        sorts = {
            "ingest": made(Role.INGEST),
            "ingest for a run": made(Role.INGEST, run_prefix="a"),
            "read": made(Role.READ),
            "read for a run": made(Role.READ, run_prefix="a"),
            "admin": made(Role.ADMIN),
            "admin for a run": made(Role.ADMIN, run_prefix="a"),
            "expired": made(Role.ADMIN, days=1),
            "revoked": made(Role.ADMIN),
        }
        for name, (token, record) in sorts.items():
            self.tokens[name] = token
            ends = revoked([record], record.token_id, now_ns=NOW_NS)
            records += ends if name == "revoked" else [record]
        write_tokens(path, records)
        book = TokenBook(path, unix_ns=lambda: NOW_NS + 2 * DAY_NS)
        access = Access(port=8050, token=OWN, tokens=book)
        self.app = create_app(access, pages=pages, not_ready=lambda: None)
        self.client = Client(create_server(access, pages=pages, not_ready=lambda: None))

    def routes(self) -> Iterator[tuple[str, str]]:
        """The application's own map, so that a route added later is walked too."""
        for route in self.app.routes:
            if isinstance(route, Route) and route.path not in OPEN:
                yield from ((method, route.path) for method in sorted(route.methods or ()))

    def ask(self, method: str, path: str, sort: str) -> int:
        headers = {"authorization": f"Bearer {self.tokens[sort]}"} if self.tokens[sort] else {}
        return self.client.request(method, path, headers=headers).status_code


@pytest.fixture
def doors(path: Path) -> Doors:
    return Doors(path)


def test_every_route_of_the_application_is_in_the_table(doors: Doors) -> None:
    assert set(doors.routes()) <= set(ROUTE_RULES)


ALLOWED = {
    ("POST", "/v1/clock"): {"own", "ingest", "ingest for a run", "admin", "admin for a run"},
    ("POST", "/v1/spans"): {"own", "ingest", "ingest for a run", "admin", "admin for a run"},
    ("POST", "/v1/rows/spans"): {"own", "ingest", "ingest for a run", "admin", "admin for a run"},
    ("GET", "/v1/resume"): {"own", "ingest", "ingest for a run", "admin", "admin for a run"},
    ("GET", "/timeline"): {"own", "read", "admin"},
    ("POST", "/logout"): {"own", "read", "read for a run", "admin", "admin for a run"},
    ("POST", "/_dash-update-component"): {"own", "read", "admin"},
    ("GET", "/v1/openapi.json"): {"own", "read", "read for a run", "admin", "admin for a run"},
    ("HEAD", "/v1/openapi.json"): {"own", "read", "read for a run", "admin", "admin for a run"},
    ("POST", "/v1/not-there"): {"own", "admin"},
    ("GET", "/v1/clock"): {"own", "admin"},
}
"""Who may what; everybody else with a live token gets 403, without one 401."""


@pytest.mark.parametrize("route", ALLOWED)
def test_each_role_comes_as_far_as_the_table_says(doors: Doors, route: tuple[str, str]) -> None:
    method, path = route
    answers = {sort: doors.ask(method, path, sort) for sort in doors.tokens}

    for sort in ("none", "expired", "revoked"):
        assert answers.pop(sort) == 401, sort
    refused = {sort for sort, status in answers.items() if status == 403}
    assert refused == set(answers) - ALLOWED[route]
    assert all(status < 500 for status in answers.values())


def test_each_route_of_the_application_is_in_the_checked_table(doors: Doors) -> None:
    assert set(doors.routes()) <= set(ALLOWED)


MALFORMED = [
    b"Bearer",
    b"Bearer ",
    b"Bearer rst_",
    b"Bearer rst_0123456789ab_" + b"A" * 43,
    b"Bearer rst_0123456789ab_" + b"A" * 1_000_000,
    b"Bearer \xff\xfe\x00",
    b"Basic cnN0Og==",
    b"bearer\trst_",
    b",,,,",
]


@pytest.mark.parametrize("value", MALFORMED, ids=lambda value: repr(value[:24]))
def test_a_malformed_token_is_401_with_one_body_on_every_route(doors: Doors, value: bytes) -> None:
    for method, path in [*doors.routes(), ("GET", "/timeline"), ("DELETE", "/v1/x")]:
        answer = doors.client.request(method, path, headers={"authorization": value})
        body = b"" if method == "HEAD" else UNAUTHORIZED
        assert (answer.status_code, answer.content) == (401, body), f"{method} {path}"


def test_a_refusal_says_nothing_of_the_token(doors: Doors) -> None:
    for sort, body in (("expired", UNAUTHORIZED), ("revoked", UNAUTHORIZED), ("read", WRONG_ROLE)):
        headers = {"authorization": f"Bearer {doors.tokens[sort]}"}
        assert doors.client.post("/v1/clock", headers=headers).content == body


def test_a_token_of_the_file_opens_no_session_by_url_or_form(doors: Doors) -> None:
    token = doors.tokens["admin"]

    assert doors.client.get("/", params={"token": token}).status_code == 401
    assert doors.client.post("/login", data={"token": token}).status_code == 401


def test_a_token_is_checked_before_a_byte_of_the_body_is_read(path: Path) -> None:
    book = TokenBook(path)
    sent: list[Message] = []

    async def app(*_: object) -> None:
        raise AssertionError("it came in")

    async def receive() -> Message:
        raise AssertionError("the body was asked for")

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/spans",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"authorization", b"Bearer nothing")],
    }
    in_a_loop(_call(AccessGate(app, Access(port=1, tokens=book)), scope, receive, send))

    assert sent[0]["status"] == 401


async def _call(app: AsgiApp, scope: Scope, receive: object, send: object) -> None:
    await app(scope, receive, send)  # type: ignore[arg-type]


def test_the_gate_tells_the_application_which_runs_a_token_covers(path: Path) -> None:
    token, record = made(Role.INGEST, run_prefix="llama-")
    write_tokens(path, [record])
    seen: list[Grant] = []

    async def app(scope: Scope, *_: object) -> None:
        seen.append(scope[GRANT_KEY])

    async def nothing(*_: object) -> Message:
        return {}

    access = Access(port=1, tokens=TokenBook(path, unix_ns=lambda: NOW_NS))
    headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {token}".encode())]
    scope: Scope = {"type": "http", "method": "POST", "path": "/v1/clock", "query_string": b""}
    in_a_loop(_call(AccessGate(app, access), {**scope, "headers": headers}, nothing, nothing))

    assert [seen[0].covers(run) for run in ("llama-7b", "llama", "other", "")] == [
        True,
        False,
        False,
        False,
    ]


def test_the_clock_answers_a_probe(doors: Doors) -> None:
    headers = {"authorization": f"Bearer {doors.tokens['ingest for a run']}"}

    first = parse_reply(doors.client.post("/v1/clock", headers=headers).json())
    second = parse_reply(doors.client.post("/v1/clock", headers=headers).json())

    assert first.reference_id == second.reference_id
    assert second.received_ns >= first.replied_ns
