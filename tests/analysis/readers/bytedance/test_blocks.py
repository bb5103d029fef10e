from __future__ import annotations

import numpy as np

from rankscope.analysis.readers.bytedance.blocks import map_slices


def test_slices_cover_all_rows_once_and_results_are_in_order() -> None:
    values = np.arange(10)

    assert map_slices(lambda rows: values[rows].tolist(), 10, slice_rows=4) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert map_slices(lambda rows: rows, 0) == []
