"""FLOPs counted by torch in the first step, if the user asks for it: of any model."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import TYPE_CHECKING, Any

from .decoder import ModelFlops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COUNT_VARIABLE = "RANKSCOPE_COUNT_FLOPS"

CONVENTION = (
    "counted by torch's FlopCounterMode in the first step, recomputation included; scaled dot"
    " product attention per squared length, causal mask not halved, all else per token"
)


class FlopCount:
    """Counts the FLOPs of forwards and backwards. A counted step is slow: each operation is seen.

    The counter is active within one call of the model or of the backward only, so that modes of the
    job are entered and left around it.
    """

    def __init__(self) -> None:
        self._mode: Any = None
        self._attention = 0
        self._total = 0
        self._is_complete = True

    def count_forward(self, model: Any) -> None:  # noqa: ANN401 - a Module
        """Count until the forward that now begins has ended."""
        self._end()
        self._begin()

        def after(*about: object) -> None:
            hook.remove()
            self._end()

        hook = model.register_forward_hook(after, always_call=True)

    def count_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``backward``, which counts for one call."""
        self._end()

        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self._begin()
            try:
                return backward(*args, **kwargs)
            finally:
                self._end()

        return counted

    def flops(self, shapes: Sequence[tuple[int, ...] | None]) -> ModelFlops | None:
        """Return the FLOPs of the counted calls; None if there were none, or tokens are unknown.

        Args:
            shapes: Shapes of the token ids of the forwards; None if they had none.
        """
        token_shapes = [shape for shape in shapes if shape is not None]
        if (
            not self._is_complete
            or not self._total
            or not token_shapes
            or len(token_shapes) < len(shapes)
        ):
            return None
        squares = sum(math.prod(shape) * shape[-1] for shape in token_shapes)
        return ModelFlops(
            flops_per_token=(self._total - self._attention) / sum(map(math.prod, token_shapes)),
            flops_per_squared_length=self._attention / squares,
            convention=CONVENTION,
        )

    def _begin(self) -> None:
        with contextlib.suppress(Exception):  # promise 1: harmless
            from torch.utils.flop_counter import FlopCounterMode

            mode: Any = FlopCounterMode(display=False)
            formulas = {**mode.flop_registry, **_missing_formulas(mode.flop_registry)}
            mode.flop_registry = {op: self._guard(formula) for op, formula in formulas.items()}
            mode.__enter__()
            self._mode = mode

    def _end(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            with contextlib.suppress(Exception):  # promise 1: harmless
                mode.__exit__(None, None, None)
                counts = mode.get_flop_counts().get("Global", {})
                self._total += sum(counts.values())
                self._attention += sum(num for op, num in counts.items() if "attention" in str(op))

    def _guard(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        """Return a formula of torch that raises nothing into the job."""

        def guarded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            try:
                return formula(*args, **kwargs)
            except Exception:  # noqa: BLE001 - promise 1: harmless
                self._is_complete = False
                return 0

        return guarded


def _missing_formulas(registry: dict[Any, Any]) -> dict[Any, Any]:
    """Return the formulas of the attention on a CPU, which torch does not count."""
    aten = sys.modules["torch"].ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: registry[
            aten._scaled_dot_product_flash_attention
        ],
        aten._scaled_dot_product_flash_attention_for_cpu_backward: registry[
            aten._scaled_dot_product_flash_attention_backward
        ],
    }
