"""Reports and proof cards as JSON that reads back equal, for a process of the same version."""

from __future__ import annotations

import json
from functools import cache
from hashlib import sha256

from pydantic import TypeAdapter, with_config

from .proof_card import ProofCard
from .report import RunReport


@cache
def _adapter() -> TypeAdapter[RunReport]:
    return TypeAdapter(with_config(ser_json_inf_nan="constants", extra="forbid")(RunReport))


@cache
def report_form() -> str:
    """Return a digest of the names and types of a report's fields.

    A stored report of another form may read with defaults in place of what it lacks.
    """
    schema = _adapter().json_schema(mode="serialization")
    return sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()[:12]


def write_report(report: RunReport) -> str:
    """Return a report as text."""
    text = _adapter().dump_json(report, fallback=lambda value: value.item(), warnings=False)
    return text.decode()


def read_report(text: str) -> RunReport:
    """Return the report that `write_report` wrote.

    Raises:
        ValueError: The text has another form, or is of another version.
    """
    try:
        return _adapter().validate_json(text)
    except ValueError as error:
        raise ValueError(f"not a report of this version: {error}") from error


@cache
def _card_adapter() -> TypeAdapter[ProofCard]:
    return TypeAdapter(with_config(ser_json_inf_nan="constants", extra="forbid")(ProofCard))


def write_card(card: ProofCard) -> str:
    """Return the proof card of a finding as text."""
    text = _card_adapter().dump_json(card, fallback=lambda value: value.item(), warnings=False)
    return text.decode()


def read_card(text: str) -> ProofCard | None:
    """Return the card that `write_card` wrote; None if the text is of another version."""
    try:
        return _card_adapter().validate_json(text)
    except ValueError:
        return None
