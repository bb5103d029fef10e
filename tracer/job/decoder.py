"""Sizes of a decoder-only transformer, and the weights and FLOPs that follow from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

TIMES_6 = 6
"""FLOPs per weight and token: 2 forward, 4 backward."""

REPEATED = 1 / 3
"""FLOPs of a second forward, over those of forward and backward."""


class UnknownFlopsError(Exception):
    """The FLOPs of a model are unknown; the message is the reason, without a full stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """The FLOPs of training on a sequence, and the convention by which they are counted."""

    flops_per_token: float
    convention: str
    flops_per_squared_length: float = 0.0
    """FLOPs that grow with the squared length of a sequence, over it: those of the attention."""

    flops_per_windowed_length: float = 0.0
    """FLOPs of the attention in layers with a window, over the length times what a token attends
    to: the length, at most the window."""

    window: int | None = None
    """Tokens to which a token attends at most in those layers; None if there are none."""

    recomputed_flops_per_token: float | None = None
    """FLOPs of the forward that activation recomputation repeats, per token; None if unknown."""

    recomputed_attention_ratio: float | None = None
    """The same of the attention, over the FLOPs of the attention."""

    def derived(self) -> dict[str, object]:
        """Return the entries of the manifest's ``derived``."""
        entries = asdict(self)
        del entries["window"]
        return {"flops_convention": entries.pop("convention"), **entries}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (MLA): queries, keys and values come from vectors of low rank.

    Source:
        arXiv 2412.19437, section 2.1.1.
    """

    query_rank: int | None
    """None: queries are projected at once."""

    rank: int
    """Of keys and values."""

    nope_size: int
    """Size of a head's queries and keys without the rotary part, ``rope_size``."""

    rope_size: int
    value_size: int

    @property
    def query_size(self) -> int:
        """Return the size of a head's queries and keys."""
        return self.nope_size + self.rope_size

    def count_weights(self, hidden: int, num_heads: int) -> int:
        """Return the weights of the projections of one layer."""
        if self.query_rank is None:
            queries = hidden * num_heads * self.query_size
        else:
            queries = self.query_rank * (hidden + num_heads * self.query_size)
        keys = hidden * (self.rank + self.rope_size)
        values = self.rank * num_heads * (self.nope_size + self.value_size)
        return queries + keys + values + num_heads * self.value_size * hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Feed-forward layers of which a router selects some for each token."""

    num: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    """Width of the experts that every token passes, together."""

    num_gates: int = 0
    """Outputs of the gate of the shared experts."""

    layers: frozenset[int]
    """Layers that have experts; the others have a dense feed-forward layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder in which every token passes each layer once.

    Sizes are those of the whole model, not of a tensor-parallel rank's part.
    """

    hidden: int
    num_layers: int
    num_heads: int
    num_groups: int
    """Heads of keys and values."""

    head_size: int
    ffn: int
    """Width of a dense feed-forward layer."""

    vocabulary: int
    num_matrices: int = 3
    """Of a feed-forward layer: 3 with a gate (SwiGLU), else 2."""

    has_output_gate: bool = False
    """Whether the attention's output is multiplied by a projection of its input."""

    latent: LatentAttention | None = None
    experts: Experts | None = None
    window: int | None = None
    """Tokens to which a token attends at most in the layers ``windowed``."""

    windowed: frozenset[int] = frozenset()
    num_predicted: int = 0
    """Further tokens that are predicted (MTP), each by one more layer like the last, a projection
    of twice the hidden size, and the head."""

    @property
    def layers(self) -> Iterable[int]:
        """Return the number of each layer; those of further tokens are like the last."""
        return (*range(self.num_layers), *[self.num_layers - 1] * self.num_predicted)

    @property
    def pair_size(self) -> int:
        """Return the multiplications of one layer for a token and one that it attends to."""
        if self.latent is None:
            return 2 * self.num_heads * self.head_size
        return self.num_heads * (self.latent.query_size + self.latent.value_size)

    @property
    def num_full_layers(self) -> int:
        """Return the number of layers without a window."""
        return sum(layer not in self.windowed for layer in self.layers)

    @property
    def num_windowed_layers(self) -> int:
        """Return the number of layers with a window."""
        return sum(layer in self.windowed for layer in self.layers)

    def count_weights(self, *, is_active: bool, has_router: bool = True) -> int:
        """Return the weights of matrix products: of layers, head and predictions of further tokens.

        Args:
            is_active: Count only the experts that one token passes.
            has_router: Count the weights of the routers.
        """
        layers = sum(
            self._attention_weights() + self._ffn_weights(layer, is_active, has_router)
            for layer in self.layers
        )
        predictions = self.num_predicted * 2 * self.hidden**2
        return layers + predictions + (1 + self.num_predicted) * self.head_weights

    @property
    def head_weights(self) -> int:
        """Return the weights of the head."""
        return self.hidden * self.vocabulary

    def _attention_weights(self) -> int:
        if self.latent is not None:
            return self.latent.count_weights(self.hidden, self.num_heads)
        queries, keys = self.num_heads * self.head_size, self.num_groups * self.head_size
        gate = queries if self.has_output_gate else 0
        return self.hidden * (2 * queries + 2 * keys + gate)

    def _ffn_weights(self, layer: int, is_active: bool, has_router: bool) -> int:  # noqa: FBT001
        experts = self.experts
        if experts is None or layer not in experts.layers:
            return self.num_matrices * self.hidden * self.ffn
        num = experts.top_k if is_active else experts.num
        width = num * experts.ffn + experts.shared_ffn
        router = experts.num + experts.num_gates if has_router else 0
        return self.hidden * (self.num_matrices * width + router)

    def flops(self, convention: str, *, recomputes: bool | None = None) -> ModelFlops:
        """Return the model FLOPs of training on a sequence.

        ::

            6 N                                   per token
            6 L heads (d_qk + d_v)                per squared length, L layers without a window
            6 L_w heads (d_qk + d_v)              per length times min(length, window)

        N counts the weights of the products that a token passes, with the head and without the
        embedding.

        Args:
            convention: What is counted, in words.
            recomputes: Whether the forward of all layers is repeated; None: unknown.

        Source:
            torchtitan's ``get_num_flops_per_token``; arXiv 2204.02311, appendix B.
        """
        weights, per_pair = self.count_weights(is_active=True), TIMES_6 * self.pair_size
        heads = (1 + self.num_predicted) * self.head_weights
        again = None if recomputes is None else REPEATED * recomputes
        return ModelFlops(
            flops_per_token=float(TIMES_6 * weights),
            flops_per_squared_length=float(per_pair * self.num_full_layers),
            flops_per_windowed_length=float(per_pair * self.num_windowed_layers),
            window=self.window if self.num_windowed_layers else None,
            convention=convention,
            recomputed_flops_per_token=None
            if again is None
            else again * TIMES_6 * (weights - heads),
            recomputed_attention_ratio=again,
        )
