from __future__ import annotations

from rankscope.trainer.pipeline import order_1f1b


def test_a_stage_of_1f1b_runs_as_many_forwards_ahead_as_stages_follow() -> None:
    order = {rank: " ".join(map(str, work)) for rank, work in order_1f1b(3, 4).items()}

    assert order == {
        0: "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        1: "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        2: "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    }
