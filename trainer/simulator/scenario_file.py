"""Scenarios from TOML or JSON files, or from plain values."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from rankscope.tracer.spool import read_regular_file

from ..errors import ScenarioError
from .fault import parse_simulated_faults
from .scenario import Network, Noise, RankOrder, Scenario, Sends, TpDetail
from .schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping
    from enum import StrEnum
    from pathlib import Path

MAX_FILE_BYTES = 4 << 20

PARTS: dict[str, type[Noise] | type[Network]] = {"noise": Noise, "network": Network}
CHOICES: dict[str, type[StrEnum]] = {
    "tp_detail": TpDetail,
    "rank_order": RankOrder,
    "sends": Sends,
    "schedule": Schedule,
}


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
    if not isinstance(document, dict):
        raise ScenarioError(
            f"{path} must hold one table of settings, not a {type(document).__name__}"
        )
    return scenario_settings(document)


def scenario_settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values as fields of `Scenario`.

    Raises:
        ScenarioError: A setting is unknown or has the wrong type.
        FaultSpecError: The text of a fault is invalid.
    """
    settings = dict(_checked(document, Scenario, place=""))
    for name, part in PARTS.items():
        if name in settings:
            settings[name] = part(**_checked(settings[name], part, place=f"{name}."))
    for name, choice in CHOICES.items():
        if name in settings:
            value = settings[name]
            known = tuple(choice)
            if value not in known:
                raise ScenarioError(
                    f"scenario: {name} must be one of {', '.join(known)}, got {value!r}"
                )
            settings[name] = choice(str(value))
    for name in ("stage_weights", "expert_weights"):
        if name in settings:
            settings[name] = tuple(settings[name])
    if "faults" in settings:
        settings["faults"] = parse_simulated_faults(settings["faults"])
    return settings


def _checked(document: object, owner: Any, *, place: str) -> Mapping[str, Any]:  # noqa: ANN401
    """Return a table of settings after checking names and types."""
    if not isinstance(document, dict):
        raise ScenarioError(f"scenario: {place.rstrip('.')} must be a table of settings")
    known = {item.name: item for item in fields(owner)}
    for name, value in document.items():
        if name not in known:
            raise ScenarioError(
                f"scenario: unknown setting {place}{name}: known are {', '.join(known)}"
            )
        wanted = WANTED.get(str(known[name].type), ANYTHING)
        if not wanted.fits(value):
            raise ScenarioError(f"scenario: {place}{name} must be {wanted.text}, got {value!r}")
    return document


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """Values that a file may hold for a field."""

    text: str
    types: tuple[type, ...]
    parts: tuple[type, ...] = ()
    """Types of the elements of a list."""

    def fits(self, value: object) -> bool:
        if isinstance(value, bool) and bool not in self.types:
            return False
        if isinstance(value, list) and not all(isinstance(part, self.parts) for part in value):
            return False
        return isinstance(value, self.types)


WANTED: dict[str, _Wanted] = {
    "int": _Wanted(text="a whole number", types=(int,)),
    "int | None": _Wanted(text="a whole number", types=(int, type(None))),
    "float": _Wanted(text="a number", types=(int, float)),
    "bool": _Wanted(text="true or false", types=(bool,)),
    "tuple[float, ...]": _Wanted(text="a list of numbers", types=(list,), parts=(int, float)),
    "tuple[Fault, ...]": _Wanted(text="a list of texts", types=(list,), parts=(str,)),
}
"""By the annotation of a field; fields of other types are checked separately."""

ANYTHING = _Wanted(text="a name or a table of settings", types=(object,))


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
