"""What a manifest says of the job's configuration, flat and bounded, each distinct content once."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from ..names import storable_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..store.store import Row, Store

PARTS = ("layout", "model", "paced", "git", "config", "environment", "versions", "device")
"""Parts of a manifest that ranks of a healthy job agree on. Seeds are none: they differ by rank."""

OF_ONE_RANK = frozenset({"device.uuid"})

MAX_SETTINGS = 512
MAX_DEPTH = 8

SELECT_MANIFESTS = """
SELECT manifest_hash, settings FROM manifests FINAL WHERE run_id = {run_id:String}
"""

SELECT_RANK_MANIFESTS = """
SELECT epoch, rank, argMax(manifest_hash, (started_ns, process)) AS newest_hash
FROM ranks FINAL WHERE run_id = {run_id:String} AND manifest_hash != ''
GROUP BY epoch, rank ORDER BY epoch, rank
"""

SELECT_PREVIOUS = """
WITH now AS (
    SELECT
        argMax(JSONExtractString(model, 'name'), epoch) AS model_name,
        argMax(world_size, epoch) AS world_size,
        min(created_ns) AS created_ns
    FROM runs FINAL WHERE run_id = {run_id:String}
)
SELECT
    run_id,
    argMax(JSONExtractString(model, 'name'), epoch) AS model_name,
    argMax(world_size, epoch) AS size,
    min(created_ns) AS began_ns
FROM runs FINAL
WHERE run_id != {run_id:String} AND source_format = 'rankscope'
GROUP BY run_id
HAVING model_name != ''
    AND model_name = (SELECT model_name FROM now)
    AND size = (SELECT world_size FROM now)
    AND began_ns < (SELECT created_ns FROM now)
ORDER BY began_ns DESC, run_id LIMIT 1
"""


def manifest_row(run_id: str, manifest: Mapping[str, Any]) -> Row:
    """Return the row of table ``manifests`` for one manifest."""
    settings = settings_of(manifest)
    return {
        "run_id": run_id,
        "manifest_hash": settings_hash(settings),
        "settings": settings,
    }


def settings_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return a manifest's settings: ``environment.NCCL_DEBUG`` -> value, in order of name.

    What is null or empty is unknown, and left out.
    """
    found = {
        storable_name(name): storable_name(text)
        for part in PARTS
        for name, text in _flat(part, manifest.get(part), depth=0)
        if name not in OF_ONE_RANK
    }
    return dict(sorted(found.items())[:MAX_SETTINGS])


def settings_hash(settings: Mapping[str, str]) -> str:
    """Return a hash that is equal where all settings are."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def read_manifests(store: Store, run_id: str) -> list[tuple[int, int, Mapping[str, str]]]:
    """Return (epoch, rank, settings) of each rank that told its own; equal ones share a mapping."""
    bound = {"run_id": run_id}
    settings = {
        row["manifest_hash"]: row["settings"] for row in store.rows(SELECT_MANIFESTS, bound)
    }
    return [
        (row["epoch"], row["rank"], settings[row["newest_hash"]])
        for row in (store.rows(SELECT_RANK_MANIFESTS, bound) if settings else [])
        if row["newest_hash"] in settings
    ]


def previous_run(store: Store, run_id: str) -> str | None:
    """Return the run of the same model and world size that began last before this one.

    None where there is none, or where the job did not name its model.
    """
    found = store.rows(SELECT_PREVIOUS, {"run_id": run_id})
    return found[0]["run_id"] if found else None


def _flat(name: str, value: object, *, depth: int) -> Iterator[tuple[str, str]]:
    """Yield the leaves below ``name``; a list is one leaf."""
    if isinstance(value, dict) and depth < MAX_DEPTH:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner, depth=depth + 1)
    elif value is not None and value not in ("", {}, []):
        yield name, value if isinstance(value, str) else json.dumps(value, sort_keys=True)
