"""Peak FLOP/s and memory bandwidth of known devices, for jobs that declare no peak.

A device is looked up by the exact name that its driver gives, with or without the maker's prefix. A
device that is not listed has no peak. Slices (``MIG 1g.5gb``), power-capped and renamed parts have
other names, so they are unknown, as they must be.
"""

from __future__ import annotations

MAKERS = ("NVIDIA ", "AMD Instinct ")
TERA = 1e12
GIGA = 1e9

A100 = {"float16": 312.0, "bfloat16": 312.0, "tf32": 156.0}
"""NVIDIA A100 datasheet (June 2020), tensor cores, without sparsity; equal for all form factors."""

H100_SXM = {"float16": 989.4, "bfloat16": 989.4, "tf32": 494.7, "float8": 1978.9}
"""NVIDIA H100 tensor core GPU architecture whitepaper, table 2, H100 SXM5, without sparsity."""

H100_PCIE = {"float16": 756.0, "bfloat16": 756.0, "tf32": 378.0, "float8": 1513.0}
"""The same table, H100 PCIe."""

H100_NVL = {"float16": 835.5, "bfloat16": 835.5, "tf32": 417.5, "float8": 1670.5}
"""NVIDIA H100 datasheet (2023), column H100 NVL, half of the figures with sparsity."""

H20 = {"float16": 148.0, "bfloat16": 148.0, "tf32": 74.0, "float8": 296.0}
"""NVIDIA H20 datasheet (2023), without sparsity."""

L40S = {"float16": 362.05, "bfloat16": 362.05, "tf32": 183.0, "float8": 733.0}
"""NVIDIA L40S datasheet (2023), without sparsity."""

B200 = {"float16": 2250.0, "bfloat16": 2250.0, "float8": 4500.0}
"""NVIDIA Blackwell architecture technical brief, HGX B200, one GPU, without sparsity."""

GB200 = {"float16": 2500.0, "bfloat16": 2500.0, "float8": 5000.0}
"""The same brief, GB200, one GPU, without sparsity."""

B300 = {"float16": 2250.0, "bfloat16": 2250.0, "float8": 4500.0}
"""NVIDIA HGX platform page (2025), HGX B300: 36 and 72 PFLOP/s with sparsity for 8 GPUs."""

GB300 = {"float16": 2500.0, "bfloat16": 2500.0, "float8": 5000.0}
"""NVIDIA GB300 NVL72 page (2025): 360 and 720 PFLOP/s with sparsity for 72 GPUs."""

MI300X = {"float16": 1307.4, "bfloat16": 1307.4, "tf32": 653.7, "float8": 2614.9}
"""AMD Instinct MI300X data sheet (2023), without sparsity: 304 compute units at 2.1 GHz, 2048
operations each in 16 bits. The MI325X data sheet (2024) has the same rates."""

MI350X = {"float16": 2306.9, "bfloat16": 2306.9, "float8": 4613.7}
"""AMD Instinct MI350X data sheet (2025), without sparsity, where it is rounded to 2.3 and 4.6
PFLOP/s: 256 compute units at 2.2 GHz, 4096 operations each in 16 bits."""

MI355X = {"float16": 2516.6, "bfloat16": 2516.6, "float8": 5033.2}
"""AMD Instinct MI355X data sheet (2025): the same at 2.4 GHz, rounded to 2.5 and 5.0 PFLOP/s."""

DEVICES: dict[str, tuple[dict[str, float], float | None]] = {
    "A100-PCIE-40GB": (A100, 1555.0),
    "A100-SXM4-40GB": (A100, 1555.0),
    "A100 80GB PCIe": (A100, 1935.0),
    "A100-SXM4-80GB": (A100, 2039.0),
    "A800-SXM4-80GB": (A100, 2039.0),
    "A800 80GB PCIe": (A100, 1935.0),
    "H100 80GB HBM3": (H100_SXM, 3350.0),
    "H100 PCIe": (H100_PCIE, 2000.0),
    "H100 NVL": (H100_NVL, 3900.0),
    "H800": (H100_SXM, 3350.0),
    "GH200 480GB": (H100_SXM, None),
    # The H200 datasheet (2024) gives the H100's rates; only the memory is larger.
    "H200": (H100_SXM, 4800.0),
    "H200 NVL": (H100_NVL, 4800.0),
    "H20": (H20, 4000.0),
    "H20-3e": (H20, None),
    "L40S": (L40S, 864.0),
    "B200": (B200, 8000.0),
    "GB200": (GB200, 8000.0),
    "B300": (B300, 8000.0),
    "B300 SXM6 AC": (B300, 8000.0),
    "GB300": (GB300, 8000.0),
    "MI300X": (MI300X, 5300.0),
    "MI325X": (MI300X, 6000.0),
    "MI350X": (MI350X, 8000.0),
    "MI355X": (MI355X, 8000.0),
}
"""By device name without the maker's prefix: 10^12 FLOP/s by number type, dense, and memory
bandwidth in 10^9 bytes/s.

Source of the bandwidths: the same documents, NVIDIA's A100 (2021), A800 (2022), H100 (2023) and
H200 (2024) datasheets, and those of HGX B200, GB200 NVL72 and their successors (8 TB/s a GPU)."""

UNLISTED: tuple[dict[str, float], None] = {}, None

NUMBER_TYPES = {
    "float16": "float16",
    "half": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "tf32": "tf32",
    "float8": "float8",
    "fp8": "float8",
    "float8_e4m3fn": "float8",
    "float8_e5m2": "float8",
}
"""Spellings of a number type. ``float32`` is missing on purpose: whether it runs as TF32 is a
setting that the name does not show."""

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "tf32": 4, "float8": 1}


def memory_bytes_per_s(device_name: str) -> float | None:
    """Return the memory bandwidth of one device; None if it is not listed.

    Returns:
        Bytes/s, as the vendor states it.
    """
    _, found = DEVICES.get(_model(device_name), UNLISTED)
    return None if found is None else found * GIGA


def element_bytes(dtype: str) -> int | None:
    """Return the size of one number in bytes; None if the type is not listed."""
    return ELEMENT_BYTES.get(NUMBER_TYPES.get(dtype.strip().removeprefix("torch."), ""))


def peak_flops_per_s(device_name: str, dtype: str) -> float | None:
    """Return the dense peak of one device; None if the device or the type is not listed.

    Args:
        device_name: As the driver gives it, ``NVIDIA H100 80GB HBM3``.
        dtype: Type of the matrix products, ``bfloat16`` or ``torch.bfloat16``.

    Returns:
        FLOP/s.

    Source:
        The vendor's documents named at each row of the table.
    """
    peaks, _ = DEVICES.get(_model(device_name), UNLISTED)
    peak = peaks.get(NUMBER_TYPES.get(dtype.strip().removeprefix("torch."), ""))
    return None if peak is None else peak * TERA


def _model(device_name: str) -> str:
    model = device_name.strip()
    for maker in MAKERS:
        model = model.removeprefix(maker)
    return model
