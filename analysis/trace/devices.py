"""Peak FLOP/s and memory bandwidth of known devices, for jobs that declare no peak.

A device is looked up by the exact name that its driver gives, with or without the maker's prefix. A
device that is not listed has no peak. Slices (``MIG 1g.5gb``), power-capped and renamed parts have
other names, so they are unknown, as they must be.
"""

from __future__ import annotations

MAKER = "NVIDIA "
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

B200 = {"float16": 2250.0, "bfloat16": 2250.0, "float8": 4500.0}
"""NVIDIA Blackwell architecture technical brief, HGX B200, one GPU, without sparsity."""

GB200 = {"float16": 2500.0, "bfloat16": 2500.0, "float8": 5000.0}
"""The same brief, GB200, one GPU, without sparsity."""

PEAK_TFLOPS_PER_S: dict[str, dict[str, float]] = {
    "A100-PCIE-40GB": A100,
    "A100-SXM4-40GB": A100,
    "A100 80GB PCIe": A100,
    "A100-SXM4-80GB": A100,
    "A800-SXM4-80GB": A100,
    "A800 80GB PCIe": A100,
    "H100 80GB HBM3": H100_SXM,
    "H100 PCIe": H100_PCIE,
    "H100 NVL": H100_NVL,
    "H800": H100_SXM,
    "GH200 480GB": H100_SXM,
    # The H200 datasheet (2024) gives the H100's rates; only the memory is larger.
    "H200": H100_SXM,
    "B200": B200,
    "GB200": GB200,
}
"""By device name without the maker's prefix, then by number type: 10^12 FLOP/s, dense."""

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

MEMORY_GB_PER_S: dict[str, float] = {
    "A100-PCIE-40GB": 1555.0,
    "A100-SXM4-40GB": 1555.0,
    "A100 80GB PCIe": 1935.0,
    "A100-SXM4-80GB": 2039.0,
    "A800-SXM4-80GB": 2039.0,
    "A800 80GB PCIe": 1935.0,
    "H100 80GB HBM3": 3350.0,
    "H100 PCIe": 2000.0,
    "H100 NVL": 3900.0,
    "H800": 3350.0,
    "H200": 4800.0,
}
"""By the same names: memory bandwidth in 10^9 bytes/s.
Source: NVIDIA's A100 (2021), A800 (2022), H100 (2023) and H200 (2024) datasheets."""

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "tf32": 4, "float8": 1}


def memory_bytes_per_s(device_name: str) -> float | None:
    """Return the memory bandwidth of one device; None if it is not listed.

    Returns:
        Bytes/s, as the vendor states it.
    """
    found = MEMORY_GB_PER_S.get(device_name.strip().removeprefix(MAKER))
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
    peaks = PEAK_TFLOPS_PER_S.get(device_name.strip().removeprefix(MAKER))
    number_type = NUMBER_TYPES.get(dtype.strip().removeprefix("torch."))
    if peaks is None or number_type is None:
        return None
    return peaks[number_type] * TERA if number_type in peaks else None
