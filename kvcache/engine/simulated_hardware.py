"""Accelerators as a roofline sees them: arithmetic, memory, the link to the host, with sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from kvcache.core.alike import alike
from kvcache.core.errors import ConfigError
from kvcache.core.figures import parse_figures
from kvcache.core.values import finite, shown

_MOST = 1e21
_LEAST = 1e-6


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device. Peaks are those of its datasheet, `*_share` what kernels reach of them.

    Args:
        flops: floating-point operations a second, dense, in the format that is computed in.
        memory: bytes a second of device memory.
        capacity: bytes of device memory.
        link: bytes a second to host memory, as copies of pages reach it, each way.
        flops_share, memory_share: of the peaks. By default 0.7: FlashAttention-3 reaches 0.75 of an
            H100's (arXiv 2407.08608); and 0.8: assumed, as most models of inference do.
        step_seconds: what each step takes beside (launches, sampling).
        link_seconds: from a copy's submission to its first byte.

    Raises:
        ConfigError: a figure out of range, by its name.
    """

    flops: float
    memory: float
    capacity: float
    link: float
    flops_share: float = 0.7
    memory_share: float = 0.8
    step_seconds: float = 0.0
    link_seconds: float = 10e-6
    source: str = ""

    def __post_init__(self) -> None:
        self._require(_MOST, "flops", "memory", "capacity", "link", least=1.0)
        self._require(1.0, "flops_share", "memory_share")
        self._require(60.0, "step_seconds", "link_seconds", least=0.0)

    def _require(self, most: float, *names: str, least: float = _LEAST) -> None:
        for name in names:
            value = finite(getattr(self, name), name)
            if not least <= value <= most:
                raise ConfigError(
                    f"{name} of the hardware is {value:g}: it must be from {least:g} to {most:g}"
                )


FIGURES = tuple(f.name for f in fields(Hardware) if f.name != "source")
"""Names of the numbers, as `parse_hardware` takes them."""

_NVIDIA = "NVIDIA {} datasheet, bf16 without sparsity; link: PCIe Gen{} x16 copies, {}"
_GEN5 = "52 to 54 GB/s on an H100 (vLLM pull requests 42212 and 48434)"

HARDWARE: Mapping[str, Hardware] = {
    "a100": Hardware(
        flops=312e12, memory=2.039e12, capacity=80e9, link=25e9,
        source=_NVIDIA.format("A100 80GB SXM", 4, "24 to 26 GB/s"),
    ),
    "h100": Hardware(
        flops=989.4e12, memory=3.35e12, capacity=80e9, link=53e9,
        source=_NVIDIA.format("H100 SXM", 5, _GEN5),
    ),
    "h200": Hardware(
        flops=989.4e12, memory=4.8e12, capacity=141e9, link=53e9,
        source=_NVIDIA.format("H200 SXM", 5, _GEN5 + ", an H200 has the same interface"),
    ),
    "b200": Hardware(
        flops=2250e12, memory=8e12, capacity=180e9, link=46e9,
        source=_NVIDIA.format("B200 (HGX)", 5, "40 to 46 GB/s"),
    ),
    "b300": Hardware(
        flops=2250e12, memory=8e12, capacity=288e9, link=46e9,
        source=_NVIDIA.format("B300 (HGX)", 5, "as of a B200"),
    ),
    "l40s": Hardware(
        flops=362e12, memory=864e9, capacity=48e9, link=25e9,
        source=_NVIDIA.format("L40S", 4, "24 to 26 GB/s"),
    ),
    "mi300x": Hardware(
        flops=1307.4e12, memory=5.3e12, capacity=192e9, link=53e9,
        source="AMD Instinct MI300X datasheet, bf16 without sparsity; link: PCIe Gen5 x16 copies",
    ),
}  # fmt: skip
"""By the names that `parse_hardware` takes."""


def parse_hardware(text: str) -> Hardware:
    """`h100`; `h100,link=25G`; or all of it: `flops=989T,memory=3.35T,capacity=80G,link=53G`.

    Raises:
        ConfigError: no such name or figure, or a number that cannot be.
    """
    first, *rest = text.split(",")
    name = "" if "=" in first else first
    figures = parse_figures(rest if name else (first, *rest), FIGURES, "--hardware")
    missing = [needed for needed in FIGURES[:4] if needed not in figures]
    if name in HARDWARE:
        return replace(HARDWARE[name], **figures)  # type: ignore[arg-type]
    if not name and not missing:
        return Hardware(**figures, source="as given")
    what = f"there is no hardware {shown(name)}{alike(name, list(HARDWARE))}"
    if not name:
        what = f"--hardware {shown(text)} has no {', '.join(missing)}"
    raise ConfigError(
        f"{what}: choose one of {', '.join(HARDWARE)}, or give {', '.join(FIGURES[:4])}, each as"
        " NAME=NUMBER"
    )
