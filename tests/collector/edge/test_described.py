"""The interface as it describes itself, asked by schemathesis with each sort of token."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core import NotSet

from collector.service.router import ARROW_TYPE
from collector.tokens import Role
from tests.collector.service.serving import OWN, serving, tokens_for

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from collector.store import Store


@schemathesis.serializer(ARROW_TYPE)
def as_it_is(_context: object, value: object) -> bytes:
    """Let schemathesis make bodies that are no Arrow; the fuzzed ones are the decoder's tests."""
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.mark.parametrize("sort", ["own", "ingest", "read", "expired", "none"])
def test_no_request_of_any_form_is_an_error_of_ours(
    store: Store, tmp_path: Path, sort: str
) -> None:
    book, made = tokens_for(tmp_path, ingest=(Role.INGEST, "zz"), read=(Role.READ, ""))
    shown = {"own": OWN, "expired": f"rst_0123456789ab_{'A' * 43}", **made}.get(sort)
    headers = {} if shown is None else {"authorization": f"Bearer {shown}"}
    with serving(store, tokens=book) as collector:
        described = collector.ask(
            "GET", "/v1/openapi.json", headers={"authorization": f"Bearer {OWN}"}
        ).json()
        schema = schemathesis.openapi.from_dict(described)
        described_ones: Any = schema.get_all_operations()
        operations = [found.ok() for found in described_ones]
        assert {"/v1/spans", "/v1/rows/ranks", "/v1/resume"} <= {one.path for one in operations}
        for operation in operations:
            if operation.path.startswith("/log"):
                continue  # a browser's, in test_login.py

            @settings(
                max_examples=6 if sort == "own" else 3,  # the others are turned away before
                deadline=None,
                phases=[Phase.generate],  # to shrink a failure takes minutes
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
                    assert answer.status_code == 200, answer.text  # as described is as taken
                if sort in {"none", "expired"} and case.path not in {"/healthz", "/readyz"}:
                    assert answer.status_code in {401, 429}

            ask()


def body_type(case: Any) -> dict[str, str]:  # noqa: ANN401 -- as above
    return {} if case.media_type is None else {"content-type": case.media_type}


def body_of(case: Any) -> bytes:  # noqa: ANN401 -- as above
    """Return the body as it goes over the wire; random bytes where it is no JSON."""
    if isinstance(case.body, NotSet):
        return b""
    if case.media_type == "application/json":
        return json.dumps(case.body).encode()
    return case.body if isinstance(case.body, bytes) else str(case.body).encode()


def sendable(headers: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Return those headers that HTTP can carry at all."""
    return {
        name: str(value).encode()
        for name, value in (headers or {}).items()
        if str(value).isascii() and str(value).isprintable()
    }
