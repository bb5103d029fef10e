from __future__ import annotations

import pyarrow as pa

from rankscope.server.spare_memory import use_one_allocator


def test_columns_come_from_the_c_library_afterwards() -> None:
    before = pa.default_memory_pool()
    try:
        use_one_allocator()

        assert pa.default_memory_pool().backend_name == "system"
        assert pa.array([1, 2, 3]).sum().as_py() == 6
    finally:
        pa.set_memory_pool(before)
