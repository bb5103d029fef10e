from __future__ import annotations

import math

import pytest
import torch

from rankscope.trainer.optimizer import Lamb


def updated(weight: list[float], gradient: list[float], *, decay: float = 0.0) -> list[float]:
    """Return a weight after its first update at a rate of 0.1."""
    parameter = torch.nn.Parameter(torch.tensor(weight))
    parameter.grad = torch.tensor(gradient)
    Lamb([parameter], lr=0.1, weight_decay=decay).step()
    result: list[float] = parameter.tolist()
    return result


def test_a_step_is_in_proportion_to_the_weight() -> None:
    # Adam's first direction is the sign, (1, 1) of norm sqrt(2); the weight has norm 5.
    step = 0.1 * 5 / math.sqrt(2)

    assert updated([3.0, 4.0], [2.0, 8.0]) == pytest.approx([3 - step, 4 - step], rel=1e-5)
    assert updated([30.0, 40.0], [2.0, 8.0]) == pytest.approx(
        [30 - 10 * step, 40 - 10 * step], rel=1e-5
    )


def test_the_decay_is_part_of_the_direction() -> None:
    # (1, 1) + 0.5 (3, 4) = (2.5, 3) of norm sqrt(15.25).
    scale = 0.1 * 5 / math.sqrt(15.25)

    assert updated([3.0, 4.0], [1.0, 1.0], decay=0.5) == pytest.approx(
        [3 - 2.5 * scale, 4 - 3 * scale], rel=1e-5
    )


def test_a_weight_of_zero_takes_the_step_of_adam() -> None:
    assert updated([0.0, 0.0], [1.0, -1.0]) == pytest.approx([-0.1, 0.1], rel=1e-5)


def test_the_moments_are_those_of_adam() -> None:
    gradients = [torch.tensor([1.0, -2.0]), torch.tensor([3.0, 1.0])]
    mine, other = (torch.nn.Parameter(torch.tensor([3.0, 4.0])) for _ in range(2))
    lamb, adam = Lamb([mine], lr=0.1), torch.optim.Adam([other], lr=0.1)

    for gradient in gradients:
        mine.grad, other.grad = gradient.clone(), gradient.clone()
        lamb.step()
        adam.step()

    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(lamb.state[mine][name], adam.state[other][name])


def test_communication_is_outside_of_the_timed_part() -> None:
    calls: list[str] = []
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    lamb = Lamb([parameter], lr=0.1)
    lamb.before_exchange = lambda: calls.append(f"{parameter.tolist()}")

    lamb.step()

    assert calls == ["[1.0, 1.0]"]
