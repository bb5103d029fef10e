"""Model FLOPs from the autograd graph of a loss: the products that ran, with their real shapes."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .decoder import TIMES_6, ModelFlops, UnknownFlopsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CONVENTION = (
    "6 FLOPs per token and weight of a product, 6 heads (d_qk + d_v) per squared length of its"
    " attention, as they ran in the first step; causal mask not halved, recomputation not counted"
)

MAX_NODES = 200_000
"""A larger graph is not read: a node takes some microseconds, once."""

MAX_VIEWS = 32

NEGLIGIBLE = 1e-3
"""Share of the FLOPs that may depend on neither tokens nor lengths: a head on pooled tokens.
Source: choice."""

VIEWS = frozenset(
    {"T", "View", "UnsafeView", "Reshape", "Transpose", "Permute", "ToCopy", "Alias", "Clone"}
    | {"Expand", "Unsqueeze", "Squeeze", "Slice", "Split", "SplitWithSizes", "Select"}
    | {"AsStrided", "Narrow", "Unbind"}
)
"""Operations whose result is the same weight in another form."""

PRODUCTS = ("mm", "conv", "linear", "attention", "rnn", "lstm", "gru", "einsum", "linalg", "cdist")
"""Parts of names of operations that multiply matrices. Those without a rule here are unknown."""

PLUMBING = ("torch.distributed.", "torch.nn.parallel.", "deepspeed.runtime.zero")
"""Modules whose functions in Python move tensors and multiply nothing."""


@dataclass(slots=True)
class ProductSum:
    """FLOPs of products, by what they grow with."""

    shapes: Sequence[tuple[int, ...]]
    """Shapes of the token ids of the forwards."""

    per_token: float = 0.0
    per_square: float = 0.0
    others: float = 0.0
    _numbers: frozenset[int] = field(init=False)
    _lengths: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self._numbers = frozenset(math.prod(shape) for shape in self.shapes)
        self._lengths = frozenset(shape[-1] for shape in self.shapes)

    def add(self, sizes: tuple[int, int, int, int], *, is_weight: bool, times: int) -> None:
        """Add a product of (batch, rows, inner, columns), each of whose elements costs ``times``.

        Args:
            sizes: Of the batch of products, of their rows, inner dimension and columns.
            is_weight: Whether the second factor is a weight.
            times: FLOPs of each multiplication, backward included.
        """
        batch, rows, inner, columns = sizes
        flops = float(times) * batch * rows * inner * columns
        if is_weight and rows * batch in self._numbers:
            self.per_token += flops
        elif not is_weight and rows in self._lengths and rows in {inner, columns}:
            self.per_square += flops
        else:
            self.others += flops

    def result(self, convention: str) -> ModelFlops | None:
        """Return the FLOPs per token and per squared length; None if there are others."""
        attributed = self.per_token + self.per_square
        if not attributed or self.others > NEGLIGIBLE * attributed:
            return None
        squares = sum(math.prod(shape) * shape[-1] for shape in self.shapes)
        return ModelFlops(
            flops_per_token=self.per_token / sum(math.prod(shape) for shape in self.shapes),
            flops_per_squared_length=self.per_square / squares,
            convention=convention,
        )


class FirstStep:
    """The forwards and backwards of one step, of which the first backward's graph is read.

    The others must be alike: as many forwards to each backward as to the first.
    """

    def __init__(self) -> None:
        self.all_shapes: list[tuple[int, ...] | None] = []
        """Shapes of the token ids of all forwards; None for one without."""

        self._shapes: list[tuple[int, ...] | None] = []
        self._num_backwards = 0
        self._flops: ModelFlops | None = None

    def forward_begins(self, shape: tuple[int, ...] | None) -> None:
        """Note a forward with gradients and the shape of its token ids."""
        self.all_shapes.append(shape)
        if not self._num_backwards:
            self._shapes.append(shape)

    def backward_begins(self, roots: Sequence[Any]) -> None:
        """Read the graph of the first backward."""
        self._num_backwards += 1
        shapes = [shape for shape in self._shapes if shape is not None]
        if self._num_backwards == 1 and shapes and len(shapes) == len(self._shapes):
            self._flops = graph_flops(roots, shapes)

    def flops(self, model: Any) -> ModelFlops | None:  # noqa: ANN401 - a Module
        """Return the FLOPs of ``model`` once the step has ended; None if they are unknown."""
        is_alike = len(self.all_shapes) == self._num_backwards * len(self._shapes)
        return self._flops if is_alike and not _hides_products(model) else None


def _hides_products(model: Any) -> bool:  # noqa: ANN401
    """Return whether products of the model may be missing from its graph, or be mistaken.

    Layers that are frozen as a whole are in no graph. A decoder that attends to the output of an
    encoder has two lengths, which one batch may have equal.
    """
    nn = sys.modules["torch"].nn
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return True
    for module in model.modules():
        if isinstance(module, (nn.Transformer, nn.TransformerDecoder)):
            return True
        parameters = module.parameters(recurse=False)
        is_lookup = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if not is_lookup and any(not it.requires_grad and it.dim() > 1 for it in parameters):
            return True
    return False


def graph_flops(roots: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> ModelFlops | None:
    """Return the model FLOPs of the graph below ``roots``; None if they are unknown.

    The graph has each product of the forward with its real shapes, whichever module or function
    made it. Only shapes are read: no saved tensor is unpacked, which could compute it again.

    They are unknown if a product depends on something else than the number of tokens and the
    lengths (routed experts, convolutions, recurrent layers), if one is inside a function that hides
    it (a compiled function, a kernel of another library), if a factor is a frozen weight, or if
    weights are split over tensor-parallel ranks.

    Args:
        roots: Losses whose backward begins.
        shapes: Shapes of the token ids of the forwards that led to them.
    """
    products = ProductSum(shapes)
    try:
        for node in _walk(roots):
            _add_node(products, node)
    except UnknownFlopsError:
        return None
    return products.result(CONVENTION)


def _walk(roots: Sequence[Any]) -> Iterator[Any]:
    waiting = [root.grad_fn for root in roots]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if len(seen) > MAX_NODES:
            raise UnknownFlopsError
        waiting.extend(following for following, _ in node.next_functions)
        yield node


def _add_node(products: ProductSum, node: Any) -> None:  # noqa: ANN401 - a Node
    hidden = getattr(node, "_forward_cls", None)
    if hidden is not None:
        if not _is_plumbing(hidden):
            raise UnknownFlopsError
        return
    name = operation_name(node)
    if name == "torch::autograd::AccumulateGrad":
        if type(node.variable).__name__ == "DTensor":  # else it is whole here
            raise UnknownFlopsError
    elif name in RULES:
        RULES[name](products, node)
    elif name.startswith("ScaledDotProduct"):
        _add_attention(products, node)
    elif any(part in name.lower() for part in PRODUCTS):
        raise UnknownFlopsError


def operation_name(node: Any) -> str:  # noqa: ANN401 - a Node
    """Return the name of an operation without the suffix of its backward."""
    name: str = node.name()
    return name.partition("Backward")[0]


def _is_plumbing(function: type) -> bool:
    module = function.__module__
    is_checkpoint = module == "torch.utils.checkpoint" and function.__name__.startswith("_Noop")
    return is_checkpoint or (module.startswith(PLUMBING) and "experimental" not in module)


def _add_matrix(products: ProductSum, node: Any) -> None:  # noqa: ANN401
    """Add ``mm`` or ``addmm``, whose factors are the last two inputs."""
    (rows, inner), (_, columns) = _factors(node)
    factor = node.next_functions[-1]
    num_lengths = sum(size in products._lengths for size in (rows, inner, columns))
    is_weight = _is_weight(factor) or num_lengths <= 1  # else it may be an attention
    if is_weight and factor[0] is None:
        raise UnknownFlopsError  # frozen
    products.add((1, rows, inner, columns), is_weight=is_weight, times=TIMES_6)


def _add_batch(products: ProductSum, node: Any) -> None:  # noqa: ANN401
    """Add ``bmm`` or ``baddbmm``, whose factors are the last two inputs."""
    (batch, rows, inner), (_, _, columns) = _factors(node)
    is_weight = batch == 1 and _is_weight(node.next_functions[-1])
    products.add((batch, rows, inner, columns), is_weight=is_weight, times=TIMES_6)


def _add_attention(products: ProductSum, node: Any) -> None:  # noqa: ANN401
    query, key, value = (_shape(*each) for each in node.next_functions[:3])
    if query is None or key is None or value is None:
        raise UnknownFlopsError
    batch, rows, columns = math.prod(query[:-2]), query[-2], key[-2]
    for inner in (query[-1], value[-1]):
        products.add((batch, rows, inner, columns), is_weight=False, times=TIMES_6)


def _factors(node: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:  # noqa: ANN401
    """Return the shapes of the two factors of a product.

    A factor without a gradient is not in the graph: its shape follows from the other's and the
    result's.
    """
    first, second = (_shape(*each) for each in node.next_functions[-2:])
    result = tuple(node._input_metadata[0].shape)
    if first is None:
        if second is None:
            raise UnknownFlopsError
        first = (*result[:-1], second[-2])
    return first, second or (*result[:-2], first[-1], result[-1])


def _shape(node: Any, index: int) -> tuple[int, ...] | None:  # noqa: ANN401
    """Return the shape of one result of an operation; None if it is not in the graph."""
    if node is None:
        return None
    if hasattr(node, "variable"):
        return tuple(node.variable.shape)
    return tuple(node._input_metadata[index].shape)


def _is_weight(factor: tuple[Any, int]) -> bool:
    """Return whether a factor is a parameter, whole or as a view."""
    node, _ = factor
    for _ in range(MAX_VIEWS):
        if node is None:
            return False
        if hasattr(node, "variable"):
            return True
        hidden = getattr(node, "_forward_cls", None)
        if not (operation_name(node) in VIEWS if hidden is None else _is_plumbing(hidden)):
            return False
        node = next(
            (following for following, _ in node.next_functions if following is not None), None
        )
    return False


RULES: dict[str, Callable[[ProductSum, Any], None]] = {
    "Mm": _add_matrix,
    "Addmm": _add_matrix,
    "Bmm": _add_batch,
    "Baddbmm": _add_batch,
}
"""How each kind of product is added."""
