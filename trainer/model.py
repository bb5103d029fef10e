"""A small Llama: rotary attention, SwiGLU or experts, RMSNorm, split into pipeline stages.

Attention may have fewer heads of keys and values, and a window; a block may be parallel.

Plain modules without ranks, pace or tracer: `parallel` shards them, `segments` times them. Between
embedding and loss a micro-batch is a matrix with one row per token, because DTensor pays for every
reshape around a matmul (a quarter of a small segment's CPU time) and a matrix needs none.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable  # noqa: TC003 - of a dataclass
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.nn import functional

from .config import layers_of_stage
from .errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .config import ModelConfig

ROTARY_BASE = 10_000.0
INITIAL_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Documents in each sequence, which do not attend to each other."""

    positions: torch.Tensor
    """int64, shape ``(seq,)``: position of each token in its document."""

    mask: torch.Tensor
    """bool, shape ``(seq, seq)``: whether a token (row) attends to another (column)."""


class Exchange(Protocol):
    """Communication that brings rows to their experts and back."""

    def __call__(
        self, rows: torch.Tensor, counts: torch.Tensor, experts: LocalExperts
    ) -> torch.Tensor:
        """Return each row's result, in the order of ``rows``.

        Args:
            rows: Shape ``(rows, hidden)``, sorted by expert.
            counts: int64, shape ``(experts,)``: rows of each expert.
            experts: Those of this rank.
        """


def normalize(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the RMSNorm of each row."""
    return functional.rms_norm(x, weight.shape, weight)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs ``(x[i], x[i + head_size / 2])`` by the angles of their position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def activate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``."""
    return functional.silu(gate) * up


class Products:
    """The products into and out of attention or MLP, by the modules of their weights."""

    def enter(self, x: torch.Tensor, *linears: nn.Module) -> tuple[torch.Tensor, ...]:
        """Return the product of each linear with ``x``, shape ``(rows, inputs)``."""
        return tuple(linear(x) for linear in linears)

    def leave(self, x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
        """Return the product of one linear."""
        output: torch.Tensor = linear(x)
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The functions between the matmuls; PyTorch's plain operators by default."""

    normalize: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = normalize
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = rotate
    activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = activate


PLAIN = Kernels()
WHOLE = Products()


def compile_kernels() -> Kernels:
    """Return functions that are compiled at their first call, each to one kernel a direction."""
    # Ranks that share the cores compile in their own process: workers would cost memory for each.
    torch._inductor.config.compile_threads = 1
    compiled = {item: torch.compile(getattr(PLAIN, item)) for item in Kernels.__slots__}
    return Kernels(**compiled)


def check_compiler() -> None:
    """Raise a `ConfigError` if there is no compiler for `compile_kernels`."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(
            "TrainerConfig.fused needs a C++ compiler: install g++, or leave out --fused"
        ) from None


def set_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Let all modules use these functions."""
    for module in model.modules():
        if isinstance(module, (Norm, Attention, SwiGlu)):
            module.kernels = kernels


class Norm(nn.RMSNorm):
    """RMSNorm by `Kernels`."""

    kernels = PLAIN

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize each row of ``x``."""
        return self.kernels.normalize(x, self.weight)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; with tp each rank has a share of the heads."""

    kernels = PLAIN
    products = WHOLE
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    gathered: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.seq_length = config.seq_length
        self.window = config.window
        kv_size = config.num_kv_heads * config.head_size
        self.wq = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.wk = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.wv = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        cos, sin = rotary_table(config.seq_length, config.head_size)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.packing: Packing | None = None
        self.gather: nn.Module | None = None
        """Gathers keys and values of a context-parallel group, see `divide_sequences`."""

    def divide_sequences(
        self, gather: nn.Module, positions: torch.Tensor, gathered: torch.Tensor
    ) -> None:
        """Let this rank have a part of each sequence.

        Args:
            gather: Gathers keys and values, shape ``(2, batch, heads, seq, head_size)``, over a
                group along seq, and reduces their gradients.
            positions: int64, shape ``(seq / cp,)``: positions of this rank's tokens.
            gathered: int64, shape ``(seq,)``: positions of the gathered keys.
        """
        self.gather = gather
        self.seq_length = len(positions)
        self.register_buffer("positions", positions, persistent=False)
        self.register_buffer("gathered", gathered, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix the positions of each sequence in ``x``, shape ``(tokens, hidden)``."""
        cos, sin, mask = self._rotations_and_mask()
        rotate = self.kernels.rotate
        heads = map(self._heads, self.products.enter(x, self.wq, self.wk, self.wv))
        query, key, value = heads
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if self.gather is not None:
            key, value = self.gather(torch.stack((key, value)))
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=key.shape[1] < query.shape[1],
        )
        return self.products.leave(mixed.transpose(1, 2).flatten(0, 1).flatten(1), self.wo)

    def _rotations_and_mask(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return cos and sin of each token, and which tokens it attends to if not all before it."""
        packing = self.packing
        cos, sin, mask = self.cos, self.sin, None
        if self.window:
            # A query has the `window` tokens up to its own.
            mask = torch.ones(len(cos), len(cos), dtype=torch.bool, device=cos.device)
            mask = mask.tril().triu(1 - self.window)
        if packing is not None:
            cos, sin = cos[packing.positions], sin[packing.positions]
            mask = packing.mask if mask is None else mask & packing.mask
        if self.gather is not None:
            rows, columns = self.positions, self.gathered
            mask = rows[:, None] >= columns[None, :] if mask is None else mask[rows][:, columns]
            cos, sin = cos[rows], sin[rows]
        return cos, sin, mask

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``(batch, this rank's heads, this rank's seq, head_size)``."""
        num_heads = x.shape[-1] // self.head_size
        return x.view(-1, self.seq_length, num_heads, self.head_size).transpose(1, 2)


class SwiGlu(nn.Module):
    """The MLP: ``w2(silu(w1 x) * w3 x)``."""

    kernels = PLAIN
    products = WHOLE

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.w2 = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each row of ``x``, shape ``(tokens, hidden)``."""
        gate, up = self.products.enter(x, self.w1, self.w3)
        return self.products.leave(self.kernels.activate(gate, up), self.w2)


class LocalExperts(nn.ModuleDict):
    """The experts of one rank, each an MLP, by their number in the layer."""

    def forward(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Transform the rows of ``x``: the first ``counts[0]`` by the first expert, and so on."""
        parts = torch.split(x, list(counts))
        # Also those without rows: every weight gets a gradient, as its other copies expect.
        return torch.cat([expert(part) for expert, part in zip(self.values(), parts, strict=True)])


class Experts(nn.Module):
    """A mixture of experts: a router sends each token to the best few, without a limit."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_chosen = config.experts_per_token
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = LocalExperts(
            {str(number): SwiGlu(config) for number in range(config.num_experts)}
        )
        self.exchange: Exchange | None = None
        """Brings rows to the ranks that have their experts; None if this rank has all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the chosen experts for each row of ``x``."""
        weights, chosen = self.router(x).softmax(-1).topk(self.num_chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        rows = x[order // self.num_chosen]
        counts = chosen.flatten().bincount(minlength=self.router.out_features)
        if self.exchange is None:
            output = self.experts(rows, counts.tolist())
        else:
            output = self.exchange(rows, counts, self.experts)
        output = output[order.argsort()].unflatten(0, (-1, self.num_chosen))
        mixed: torch.Tensor = (output * weights[..., None]).sum(1)
        return mixed


class Block(nn.Module):
    """One transformer layer.

    In a parallel one, attention and MLP have the same normed input (arXiv 2402.15627, section 3.1).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = Norm(config.hidden_size)
        self.attention = Attention(config)
        self.mlp_norm = None if config.parallel_block else Norm(config.hidden_size)
        self.mlp = Experts(config) if config.num_experts else SwiGlu(config)
        if config.parallel_block:
            self.total = nn.Identity()  # where tp adds up the parts of both halves at once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` after attention and MLP, same shape."""
        if self.mlp_norm is None:
            normed = self.attention_norm(x)
            both: torch.Tensor = x + self.total(self.attention(normed) + self.mlp(normed))
            return both
        x = x + self.attention(self.attention_norm(x))
        output: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class Stage(nn.Module):
    """The layers of one pipeline stage; the first embeds tokens, the last returns logits."""

    def __init__(self, config: ModelConfig, *, stage: int, num_stages: int) -> None:
        super().__init__()
        layers = layers_of_stage(stage, num_layers=config.num_layers, num_stages=num_stages)
        self.embedding: nn.Embedding | None = None
        self.rows = slice(None)
        """Rows of a micro-batch that this rank embeds; with sequence parallelism a part of them."""
        self.head: nn.Sequential | None = None
        if stage == 0:
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        # Keyed by the layer's number in the whole model, so that a weight has the same name, and
        # thus the same initial value, on every layout.
        self.blocks = nn.ModuleDict({str(layer): Block(config) for layer in layers})
        if stage == num_stages - 1:
            self.head = nn.Sequential(
                Norm(config.hidden_size),
                nn.Linear(config.hidden_size, config.vocab_size, bias=False),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the stage on one micro-batch.

        Args:
            x: Tokens, shape ``(batch, seq)``, on the first stage; else the previous stage's
                output, shape ``(tokens, hidden)``, of the rows of this rank.

        Returns:
            Logits, shape ``(tokens, vocab)``, on the last stage; else the input of the next stage.
        """
        if self.embedding is not None:
            x = self.embedding(x.flatten()[self.rows])
        for block in self.blocks.values():
            x = block(x)
        if self.head is not None:
            x = self.head(x)
        return x


def pack(model: nn.Module, documents: tuple[int, ...]) -> None:
    """Pack each sequence of the next micro-batches with documents of these lengths."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    device = blocks[0].attention.cos.device
    number = torch.repeat_interleave(torch.tensor(documents)).to(device)
    positions = torch.cat([torch.arange(length) for length in documents]).to(device)
    mask = (number[:, None] == number[None, :]).tril()
    for block in blocks:
        block.attention.packing = Packing(positions=positions, mask=mask)


def rotary_table(seq_length: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of each position's angles, each ``(seq_length, head_size / 2)``.

    Source:
        Su et al., "RoFormer" (arXiv 2104.09864), equation 15.
    """
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_size, 2) / head_size)
    angles = torch.outer(torch.arange(seq_length), frequencies)
    return angles.cos(), angles.sin()


def initialize(stage: nn.Module, *, seed: int) -> None:
    """Initialize the weights, each from the seed and its name only: equal on every layout."""
    for name, parameter in stage.named_parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        nn.init.normal_(parameter, std=INITIAL_STD, generator=generator)


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over the micro-batch's tokens, in nats."""
    return functional.cross_entropy(logits.float(), targets.flatten())
