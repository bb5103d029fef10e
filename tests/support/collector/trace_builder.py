"""Small traces in the published format, and their meta files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

if TYPE_CHECKING:
    from pathlib import Path

Row = dict[str, Any]

DTYPES = {
    "dp_rank": pa.int8(), "stage": pa.int8(), "rank": pa.int16(), "step": pa.int64(),
    "start_ts": pa.float32(), "duration": pa.float32(), "seq_id": pa.int32(), "mc": pa.int8(),
    "mb_id": pa.int8(), "gmc": pa.int16(),
}  # fmt: skip


def operation(optype: str = "forward-compute", **fields: object) -> Row:
    row: Row = {
        "dp_rank": 0, "stage": 0, "rank": 0, "step": 0, "optype": optype, "start_ts": 0.0,
        "duration": 1.0, "seq_id": 0, "mc": 0, "mb_id": 0, "gmc": 0,
    }  # fmt: skip
    return row | fields


def write_trace(path: Path, rows: list[Row]) -> Path:
    columns = {name: pa.array([row[name] for row in rows], dtype) for name, dtype in DTYPES.items()}
    columns["optype"] = pa.array([row["optype"] for row in rows]).dictionary_encode()
    pq.write_table(pa.table(columns), path)
    return path


def write_meta(path: Path, **sizes: object) -> Path:
    plain: Row = {"dp_size": 1, "dsp_size": 1, "pp_size": 1, "tp_size": 1, "vpp_size": 1}
    document = plain | {"world_size": 1, "trial_name": "synthetic"} | sizes
    path.write_text(yaml.safe_dump({k: v for k, v in document.items() if v is not None}))
    return path
