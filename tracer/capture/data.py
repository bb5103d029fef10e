"""Batches: the time to fetch them, and the number of tokens and sequence lengths in them."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections import Counter, UserDict, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..span import NONE, SpanKind
from .guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..patches import Patches
    from ..record.recorder import Recorder
    from .root_module import RootForwards

LOADER_MODULE = "torch.utils.data.dataloader"

MAX_WAITING = 64
"""Batches kept between loader and model: more than any job prefetches."""

TOKEN_KEYS = ("input_ids", "tokens", "input")
"""Keys of token ids in batches of Hugging Face, plain scripts and torchtitan."""

BOUNDARY_KEYS = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens")
"""Keys of the boundaries of packed sequences: the start of each, and the end of the last."""

MAX_ELEMENTS = 1 << 22
"""A larger batch is not counted, so that counting takes about a millisecond at most."""

MAX_PARTS = 4096
"""Tensors of one list that are counted: images of a batch of unequal sizes."""

MAX_DIM = 2


class Batches:
    """Follows batches from the loader, where their lengths can be read, to the model.

    The model may get a batch much later than it was fetched (prefetching), on a device, and split
    into parts. So the counts wait until a forward gets token ids of the same shape.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._guard = Guard(recorder, "batch")
        self._waiting: deque[BatchCounts] = deque(maxlen=MAX_WAITING)
        self._step = NONE
        self._next_index = 0
        self._counted: list[int | None] = []
        self._fetched: list[int | None] = []
        self.window: int | None = None
        """Tokens to which a token attends at most in some layers of the model; None: no limit."""

        recorder.count_tokens = self.take_tokens

    def fetched(self, batch: object) -> None:
        """Count a batch that a loader has returned."""
        self._guard.call(self._count, batch)

    def forward_begins(
        self, args: tuple[object, ...], kwargs: dict[str, object], *, is_microbatch: bool
    ) -> None:
        """Record the size of the batch that the root module gets.

        Args:
            is_microbatch: Whether it is a micro-batch: gradients are enabled.
        """
        if not self._guard.active:
            return
        try:
            batch = batch_of(args, kwargs)
            counts = self._match_forward(batch) if self._waiting else None
            if not is_microbatch:
                return
            if counts is None:
                counts = count_batch(batch)
            recorder = self._recorder
            if recorder.step_number != self._step:
                self._reset_if_new_step()
            index, self._next_index = self._next_index, self._next_index + 1
            num_tokens = None if counts is None else counts.num_tokens
            self._counted.append(num_tokens)
            if recorder.job_reports_microbatches:
                return
            if counts is not None and num_tokens is not None:
                windowed = None if self.window is None else counts.sum_lengths(self.window)
                recorder.append_microbatch(index, num_tokens, counts.sum_lengths(None), windowed)
            elif num_elements := count_elements(args, kwargs):
                recorder.append_microbatch(index, None, None, num_elements=num_elements)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._guard.fail(problem)

    def take_tokens(self) -> int | None:
        """Return the tokens of the step so far and reset the count; None if unknown.

        These are the tokens of the forwards, or of the batches from the loader if no forward was
        seen (a pipeline splits batches itself).
        """
        self._reset_if_new_step()
        tokens = self._counted or self._fetched
        self._counted, self._fetched = [], []
        return sum(tokens) if tokens and None not in tokens else None  # type: ignore[arg-type]

    def _count(self, batch: object) -> None:
        self._reset_if_new_step()
        counts = count_batch(batch)
        if counts is not None:
            self._waiting.append(counts)
            self._fetched.append(counts.num_tokens)

    def _reset_if_new_step(self) -> None:
        if self._recorder.step_number != self._step:
            self._step, self._next_index = self._recorder.step_number, 0
            self._counted, self._fetched = [], []

    def _match_forward(self, batch: object) -> BatchCounts | None:
        shape = read_shape(batch)
        for counts in self._waiting:
            if counts.shape == shape:
                while self._waiting.popleft() is not counts:
                    pass
                return counts
        return None


def capture_loaders(recorder: Recorder, patches: Patches, forwards: RootForwards) -> None:
    """Record a span of each ``next`` and each ``iter`` of any `DataLoader`.

    ``forwards`` handles each ``next`` and its result. The iterators of torchdata's
    ``StatefulDataLoader`` use the same ``next``.
    """
    from torch.utils.data import dataloader

    patches.wrap(
        dataloader._BaseDataLoaderIter,
        "__next__",
        functools.partial(_traced_next, recorder, forwards),
    )
    # The time to start the workers of a pass over the data.
    start = functools.partial(spanned, recorder, "start loader", SpanKind.DATA)
    patches.wrap(dataloader.DataLoader, "__iter__", start)


def _traced_next(
    recorder: Recorder, forwards: RootForwards, original: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def call(iterator: Any) -> Any:  # noqa: ANN401
        forwards.fetch_begins()
        span = recorder.host_span("next batch", SpanKind.DATA)
        span.__enter__()
        try:
            batch = original(iterator)
        except StopIteration:
            span.__exit__(None, None, None)  # the end of the data is not an error
            raise
        except BaseException:
            span.__exit__(*sys.exc_info())
            raise
        span.__exit__(None, None, None)
        forwards.fetched(batch)
        return batch

    return call


def spanned(
    recorder: Recorder, name: str, kind: SpanKind, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``original`` with a span of each of its calls."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with recorder.host_span(name, kind):
            return original(*args, **kwargs)

    return call


class BatchCounts(NamedTuple):
    """Counts of one batch; None is unknown."""

    shape: tuple[int, ...]
    """Shape of the token ids, by which the batch is matched with a forward."""

    lengths: Mapping[int, int] | None
    """How many sequences have each length."""

    @property
    def num_tokens(self) -> int | None:
        """Return the number of tokens."""
        return self.sum_lengths(1)

    def sum_lengths(self, most: int | None) -> int | None:
        """Return the sum over the sequences of the length times the length, or ``most`` if less."""
        if self.lengths is None:
            return None
        return sum(
            num * length * (length if most is None else min(length, most))
            for length, num in self.lengths.items()
        )


def count_batch(batch: object) -> BatchCounts | None:
    """Return the counts of a batch; None if it has no known token ids.

    Token ids are an integer tensor under one of `TOKEN_KEYS`, or the first element of a tuple.
    Lengths come from the boundaries of packed sequences, else from positions, else from the
    attention mask; else each row is one sequence. Of tensors on a device only the shape is read:
    lengths that only such a tensor has are unknown.

    Args:
        batch: A batch from a loader or an argument of a model: a dict, a tuple or a tensor.
    """
    tokens = _find_token_ids(batch)
    if tokens is None:
        return None
    ids, fields = tokens
    shape = tuple(map(int, ids.shape))
    num_ids = math.prod(shape)
    if num_ids > MAX_ELEMENTS:
        return BatchCounts(shape, None)
    teller = _find_lengths(fields, shape) if fields else None
    if teller is None:
        return BatchCounts(shape, {shape[-1]: math.prod(shape[:-1])})
    tensor = teller[1]  # read only if that needs no device and runs no code of the job
    if type(tensor) is not sys.modules["torch"].Tensor or tensor.device.type != "cpu":
        return BatchCounts(shape, None)
    return BatchCounts(shape, Counter(_read_lengths(*teller)))


def count_elements(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the elements of all tensors among arguments, in their lists and dicts too.

    Only one level deep, and of `MAX_PARTS` tensors at most in one of them. Subclasses of tensors
    may run code of the job or count symbols, and `torch.jit.trace` writes down what is asked: 0.
    """
    torch = sys.modules["torch"]
    tensor, num = torch.Tensor, 0
    if torch.jit.is_tracing():
        return 0
    for value in (*args, *kwargs.values()):
        parts: Iterable[Any] = value if isinstance(value, list | tuple) else (value,)
        if isinstance(value, Mapping):
            parts = value.values()
        tensors = (each for each in itertools.islice(parts, MAX_PARTS) if type(each) is tensor)
        num += sum(each.numel() for each in tensors)
    return num


def batch_of(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Return the arguments of a model that have its token ids, the positional ones if none has."""
    return kwargs if kwargs and read_shape(kwargs) is not None else args


def read_shape(batch: object) -> tuple[int, ...] | None:
    """Return the shape of a batch's token ids; None if it has none."""
    tokens = _find_token_ids(batch)
    return None if tokens is None else tuple(map(int, tokens[0].shape))


def _find_token_ids(batch: Any) -> tuple[Any, dict[str, Any]] | None:  # noqa: ANN401
    """Return the token ids and the dict that contains them, {} if none does."""
    # In the order of frequency and without a loop: each forward calls this.
    if (type(batch) is tuple or type(batch) is list) and batch:
        batch = batch[0]
        if (type(batch) is tuple or type(batch) is list) and batch:
            batch = batch[0]
    torch = sys.modules["torch"]
    if isinstance(batch, torch.Tensor):
        return (batch, {}) if _has_ids(torch, batch) else None
    if isinstance(batch, UserDict):
        batch = batch.data
    if isinstance(batch, dict):
        for key in TOKEN_KEYS:
            value = batch.get(key)
            if isinstance(value, torch.Tensor) and _has_ids(torch, value):
                return value, batch
    return None


def _has_ids(torch: Any, tensor: Any) -> bool:  # noqa: ANN401 - the module, a tensor
    dtype = tensor.dtype
    return (dtype is torch.int64 or dtype is torch.int32) and 1 <= tensor.dim() <= MAX_DIM


def _find_lengths(fields: dict[str, Any], shape: tuple[int, ...]) -> tuple[str, Any] | None:
    """Return the name and the tensor that contain the lengths; None if there is none."""
    torch = sys.modules["torch"]
    for key in (*BOUNDARY_KEYS, "position_ids", "attention_mask"):
        tensor = fields.get(key)
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.dim() == 1 if key in BOUNDARY_KEYS else tuple(tensor.shape) == shape:
            return key, tensor
    return None


def _read_lengths(name: str, teller: Any) -> list[int]:  # noqa: ANN401
    """Return the length of each sequence, from the tensor called ``name``."""
    if name in BOUNDARY_KEYS:
        return [int(length) for length in teller.diff().tolist()]
    if name == "attention_mask":
        return [int(length) for length in teller.ne(0).sum(-1).reshape(-1).tolist()]
    # Each sequence begins at position 0, and so does each row.
    flat = teller.reshape(-1)
    starts = flat.eq(0).nonzero().reshape(-1).tolist()
    rows = range(0, flat.numel(), max(int(teller.shape[-1]), 1))
    ends = sorted({*starts, *rows, flat.numel()})
    return [end - start for start, end in itertools.pairwise(ends)]
