"""Scenarios from TOML or JSON files, or from plain values."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model
from pydantic_core import PydanticSerializationError, to_json

from rankscope.tracer.spool import read_regular_file

from ..errors import ScenarioError
from ..faults.spec import parse_simulated_faults
from .scenario import Network, Noise, Scenario

if TYPE_CHECKING:
    from pathlib import Path

MAX_FILE_BYTES = 4 << 20

PARTS = {"noise": Noise, "network": Network}

KINDS = get_type_hints(Scenario) | {"faults": tuple[str, ...]}
FIELDS: dict[str, Any] = {name: (kind, None) for name, kind in KINDS.items()}
SETTINGS = create_model("Settings", __config__=ConfigDict(extra="forbid", strict=True), **FIELDS)
"""The fields of `Scenario`, none of which a file must have."""


def read_scenario_file(path: Path) -> dict[str, Any]:
    """Return the settings in a file as fields of `Scenario`.

    Raises:
        ScenarioError: The file is not readable, not TOML or JSON, or a setting is unknown or has
            the wrong type.
        FaultSpecError: The text of a fault is invalid.
    """
    try:
        text = read_regular_file(path, max_bytes=MAX_FILE_BYTES).decode()
        document = parse_document(text, suffix=path.suffix)
    except OSError as error:
        raise ScenarioError(f"cannot read {path} ({error.strerror}): check the path") from error
    except ValueError as error:
        raise ScenarioError(f"{path} is not valid {path.suffix or '.toml'}: {error}") from error
    return scenario_settings(document)


def scenario_settings(document: object) -> dict[str, Any]:
    """Return plain values as fields of `Scenario`.

    Raises:
        ScenarioError: A setting is unknown or has the wrong type.
        FaultSpecError: The text of a fault is invalid.
    """
    try:
        checked = SETTINGS.model_validate_json(to_json(document, inf_nan_mode="constants"))
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        keys, reason = [str(key) for key in first["loc"]], first["msg"]
        if first["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
            table = PARTS[keys[0]] if len(keys) > 1 else Scenario
            reason = f"unknown setting: known are {', '.join(key.name for key in fields(table))}"
        raise ScenarioError(f"scenario: {'.'.join(keys) or 'the file'}: {reason}") from invalid
    except PydanticSerializationError as error:  # text that is no Unicode
        raise ScenarioError(f"scenario: {error}") from error
    settings = {name: getattr(checked, name) for name in checked.model_fields_set}
    if "faults" in settings:
        settings["faults"] = parse_simulated_faults(settings["faults"])
    return settings


MAX_KEY_PARTS = 32


KEY_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""


LONG_KEY = re.compile(rf"(?<![\w-])(?:{KEY_PART}[ \t]*+\.[ \t]*+){{{MAX_KEY_PARTS}}}")
"""The time of tomllib grows with the square of a key's parts: 20,000 parts, 40 kB, took 14 s and
1.5 GB."""


def parse_document(text: str, *, suffix: str) -> object:
    """Return the parsed TOML or JSON document, in time and memory proportional to its length.

    Args:
        text: The document.
        suffix: Suffix of its file; ``.json`` is JSON, any other TOML.

    Raises:
        ValueError: The document is invalid, nested too deeply, or has a key of too many parts.
    """
    try:
        if suffix == ".json":
            return json.loads(text)
        if LONG_KEY.search(text):
            raise ValueError(f"a key of more than {MAX_KEY_PARTS} parts")
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
