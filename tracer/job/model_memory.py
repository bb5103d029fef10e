"""Memory of this rank's device: its size, and the bytes of parameters, gradients and optimizer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .decoder import Decoder


def read_device_memory() -> dict[str, int]:
    """Return the size of the device, and what is used outside of this process's allocator.

    To be called once, on the thread that trains: it asks the driver. {} if no device is used.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info()
    other = int(total) - int(free) - int(torch.cuda.memory_reserved())
    return {"device_bytes": int(total), "other_bytes": max(other, 0)}


def state_bytes(model: Any, optimizers: Iterable[Any]) -> dict[str, int]:  # noqa: ANN401
    """Return the bytes of the model's state on this rank, by the shapes of its tensors.

    Gradients count whether or not they are there now. The optimizer's are its moments, and copies
    of the parameters in another type that only it has.

    Args:
        model: What this rank has of the model.
        optimizers: Those that have stepped.
    """
    parameters = list(model.parameters())
    ids = set(map(id, parameters))
    of_optimizer = [
        value
        for optimizer in optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if hasattr(value, "element_size")
    ]
    of_optimizer += [
        copy
        for optimizer in optimizers
        for group in optimizer.param_groups
        for copy in group["params"]
        if id(copy) not in ids
    ]
    # Megatron-LM accumulates gradients in a tensor of its own.
    gradients = [getattr(each, "main_grad", each) for each in parameters if each.requires_grad]
    return {
        "parameter_bytes": sum(map(_local_bytes, parameters)),
        "gradient_bytes": sum(map(_local_bytes, gradients)),
        "optimizer_bytes": sum(map(_local_bytes, of_optimizer)),
    }


def layer_shape(decoder: Decoder, **settings: bool | None) -> dict[str, object]:
    """Return the sizes of a decoder's layers on which the memory of activations depends.

    Args:
        settings: ``is_fused`` (the attention's matrix is never stored), ``drops`` (dropout),
            ``is_sequence_parallel``, ``recomputes`` (every layer); None is unknown.
    """
    sizes: dict[str, object] = {
        "hidden": decoder.hidden,
        "num_layers": decoder.num_layers,
        "num_heads": decoder.num_heads,
        "num_groups": decoder.num_groups,
        "head_size": decoder.head_size,
        "ffn": decoder.ffn,
        "num_matrices": decoder.num_matrices,
        "vocabulary": decoder.vocabulary,
        "is_plain": decoder.latent is None and decoder.experts is None,
    }
    return sizes | {name: value for name, value in settings.items() if value is not None}


def _local_bytes(tensor: Any) -> int:  # noqa: ANN401
    """Return the bytes of a tensor on this rank: of a DTensor those of its shard."""
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.numel()) * int(local.element_size())
