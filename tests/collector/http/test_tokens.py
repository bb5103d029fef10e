from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.collector.errors import TokenRequestError
from rankscope.collector.http.tokens import (
    Grant,
    Role,
    TokenSet,
    TokenState,
    hash_token,
    make_token,
    mark_revoked,
)
from tests.support.collector.token_builder import DAY_NS, NOW_NS, made


def test_a_new_token_is_valid_for_its_role_and_scope_until_it_expires() -> None:
    token, record = made(Role.INGEST, run_prefix="llama-", days=7)
    tokens = TokenSet([record])

    assert tokens.grant(token, now_ns=NOW_NS) == Grant(
        role=Role.INGEST, run_prefix="llama-", token_id=record.token_id, holder="agent"
    )
    assert tokens.grant(token, now_ns=NOW_NS + 7 * DAY_NS - 1) is not None
    assert tokens.grant(token, now_ns=NOW_NS + 7 * DAY_NS) is None
    assert record.state(NOW_NS + 7 * DAY_NS) is TokenState.EXPIRED


def test_the_secret_is_not_stored() -> None:
    token, record = made()

    secret = token.removeprefix(f"rst_{record.token_id}_")
    kept = json.dumps(record.document()) + repr(record)
    assert token not in kept
    assert secret not in kept
    assert record.hash_hex == hash_token(token)
    assert len(secret) == 43  # 32 random bytes in base64


def test_two_tokens_are_never_equal() -> None:
    assert len({made()[0] for _ in range(100)}) == 100


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=200))
def test_no_other_text_is_accepted_or_raises(text: str) -> None:
    token, record = made()
    tokens = TokenSet([record])

    assert tokens.grant(text, now_ns=NOW_NS) is None
    assert tokens.grant(token + text, now_ns=NOW_NS) is None or not text


def test_a_token_with_a_changed_missing_or_added_letter_is_invalid() -> None:
    token, record = made()
    tokens = TokenSet([record])

    for index, letter in enumerate(token):
        other = "A" if letter != "A" else "B"
        assert tokens.grant(token[:index] + other + token[index + 1 :], now_ns=NOW_NS) is None
        assert tokens.grant(token[:index], now_ns=NOW_NS) is None
    assert tokens.grant(token + "\n", now_ns=NOW_NS) is None
    assert tokens.grant("x" * 1_000_000, now_ns=NOW_NS) is None


def test_a_holder_has_at_most_two_valid_tokens_for_rotation() -> None:
    # GIVEN two valid tokens
    records = [made()[1], made()[1]]
    fields = {"role": Role.INGEST, "run_prefix": "", "holder": "agent", "days": 7}

    # WHEN a third is requested, THEN it is refused, with the ids of both
    with pytest.raises(TokenRequestError, match=records[0].token_id):
        make_token(records, **fields, now_ns=NOW_NS)  # type: ignore[arg-type]

    # AND it is created if one is revoked or expired, or for another holder, scope or role
    left = mark_revoked(records, records[0].token_id, now_ns=NOW_NS)
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
def test_an_invalid_field_is_refused(change: dict[str, object], reason: str) -> None:
    fields = {"role": Role.READ, "run_prefix": "", "holder": "a", "days": 1, **change}

    with pytest.raises(TokenRequestError, match=reason):
        make_token([], **fields, now_ns=NOW_NS)  # type: ignore[arg-type]


def test_a_revoked_token_is_invalid_and_keeps_its_revocation_time() -> None:
    token, record = made()
    once = mark_revoked([record], record.token_id, now_ns=NOW_NS + 5)
    twice = mark_revoked(once, record.token_id, now_ns=NOW_NS + 9)

    assert TokenSet(once).grant(token, now_ns=NOW_NS + 6) is None
    assert once[0].state(NOW_NS) is TokenState.REVOKED
    assert twice[0].revoked_ns == NOW_NS + 5
    with pytest.raises(TokenRequestError, match="no token has the id 'none'"):
        mark_revoked([record], "none", now_ns=NOW_NS)
