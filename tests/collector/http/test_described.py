"""OpenAPI description of the server, tested by schemathesis with each kind of token."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core import NotSet

from rankscope.collector.gateway import QueryEngine, query_router
from rankscope.collector.http.application import deletion_router
from rankscope.collector.http.metrics import Metrics
from rankscope.collector.http.tokens import Role, TokenFile, make_token, write_tokens
from rankscope.collector.ingest.router import ARROW_TYPE
from rankscope.collector.retention.deletion import Deletions
from tests.support.collector.serving import OWN, serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from rankscope.collector.store.store import Store


NOW_NS = 10**18
DAY_NS = 86_400 * 10**9


@schemathesis.serializer(ARROW_TYPE)
def as_it_is(_context: object, value: object) -> bytes:
    """Return a body unchanged. Fuzzed Arrow bodies are in the decoder's tests."""
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def engine(store: Store) -> Iterator[QueryEngine]:
    assert store.path is not None
    opened = QueryEngine(store.path)
    yield opened
    opened.close()


SORTS = [
    *("admin", "ingest", "read", "none"),
    *(pytest.param(sort, marks=pytest.mark.nightly) for sort in ("own", "expired", "unknown")),
]
INVALID = {"expired", "unknown", "none"}


def tokens(folder: Path) -> tuple[TokenFile, dict[str, str]]:
    """Return a file of tokens, and the token of each kind of client; "" for none."""
    roles = {"admin": Role.ADMIN, "ingest": Role.INGEST, "read": Role.READ, "expired": Role.ADMIN}
    made = {
        sort: make_token(
            [],
            role=role,
            run_prefix="zz" if sort == "ingest" else "",
            holder=sort,
            days=1,
            now_ns=NOW_NS - (2 * DAY_NS if sort == "expired" else 0),
        )
        for sort, role in roles.items()
    }
    write_tokens(folder / "tokens.json", [record for _, record in made.values()])
    shown = {sort: token for sort, (token, _) in made.items()}
    book = TokenFile(folder / "tokens.json", unix_ns=lambda: NOW_NS)
    return book, {"own": OWN, "unknown": f"rst_0123456789ab_{'A' * 43}", "none": "", **shown}


UNDESCRIBED = re.compile("document|is not an object|product of the axes|beyond the world size")


@pytest.mark.slow
@pytest.mark.parametrize("sort", SORTS)
def test_no_generated_request_causes_a_server_error(
    store: Store, engine: QueryEngine, tmp_path: Path, sort: str
) -> None:
    book, made = tokens(tmp_path)
    headers = {"authorization": f"Bearer {made[sort]}"} if made[sort] else {}
    more = [deletion_router(store, Deletions(store)), query_router(engine)]
    with serving(store, tokens=book, more=more, metrics=Metrics()) as collector:
        described = collector.ask(
            "GET", "/v1/openapi.json", headers={"authorization": f"Bearer {OWN}"}
        ).json()
        schema = schemathesis.openapi.from_dict(described)
        described_ones: Any = schema.get_all_operations()
        operations = [found.ok() for found in described_ones]
        paths = {one.path for one in operations}
        assert {"/v1/spans", "/v1/rows/ranks", "/v1/resume", "/v1/runs", "/metrics"} <= paths
        for operation in operations:
            if operation.path.startswith("/log"):
                continue  # for browsers: see test_login.py

            @settings(
                max_examples=6 if sort == "own" else 3,  # the others are refused earlier
                deadline=None,
                phases=[Phase.generate],  # shrinking a failure takes minutes
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy())
            def ask(case: Any) -> None:  # noqa: ANN401 -- its types differ by version
                answer = collector.ask(
                    case.method,
                    case.formatted_path,
                    headers={**sendable(case.headers), **body_type(case), **headers},
                    params=dict(case.query or {}),
                    content=body_of(case),
                )
                assert answer.status_code < 500 or answer.status_code == 503
                if sort == "own" and case.path.startswith("/v1/rows/"):
                    # A described request is accepted; a schema cannot bound these.
                    is_bound = answer.status_code == 422 and UNDESCRIBED.search(answer.text)
                    assert answer.status_code == 200 or is_bound, answer.text
                if sort in INVALID and case.path not in {"/healthz", "/readyz"}:
                    assert answer.status_code in {401, 429}

            ask()


def body_type(case: Any) -> dict[str, str]:  # noqa: ANN401 -- as above
    return {} if case.media_type is None else {"content-type": case.media_type}


def body_of(case: Any) -> bytes:  # noqa: ANN401 -- as above
    """Return the body as sent: JSON, or random bytes for other types."""
    if isinstance(case.body, NotSet):
        return b""
    if case.media_type == "application/json":
        return json.dumps(case.body).encode()
    return case.body if isinstance(case.body, bytes) else str(case.body).encode()


def sendable(headers: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Return the headers that HTTP can transport."""
    return {
        name: str(value).encode()
        for name, value in (headers or {}).items()
        if str(value).isascii() and str(value).isprintable()
    }
