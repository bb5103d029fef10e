"""Types of report fields that JSON lacks: arrays, and pairs of numbers as keys."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator
from pydantic_core import core_schema

if TYPE_CHECKING:
    from pydantic_core import CoreSchema


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Codec of an array of one type: its shape, and its bytes in base64."""

    dtype: str

    def __get_pydantic_core_schema__(self, *_: object) -> CoreSchema:
        """Return the codec that pydantic uses for a field of this type."""
        return core_schema.no_info_plain_validator_function(
            self._read,
            serialization=core_schema.plain_serializer_function_ser_schema(
                self._write, return_schema=core_schema.list_schema(), when_used="json"
            ),
        )

    def _write(self, value: NDArray[Any]) -> list[Any]:
        data = np.ascontiguousarray(value, dtype=self.dtype).data
        return [*value.shape, base64.b64encode(data).decode()]

    def _read(self, value: list[Any]) -> NDArray[Any]:
        *shape, data = value
        return np.frombuffer(base64.b64decode(data), self.dtype).reshape(shape)


FloatArray = Annotated[NDArray[np.float64], StoredArray("float64")]
IntArray = Annotated[NDArray[np.int64], StoredArray("int64")]

Pair = Annotated[
    tuple[int, int],
    BeforeValidator(lambda key: tuple(key.split(",")) if isinstance(key, str) else key),
]
"""A key such as (dp, stage) or (epoch, rank), which pydantic writes as "0,1"."""
