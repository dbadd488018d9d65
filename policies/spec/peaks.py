"""Data-sheet peaks of the shipped machines, for comparison with their measured rates.

A profile holds what a machine reaches; the kappa paper divides peaks. What readers get wrong: the
paper's C is FP8 dense (the same number as FP16 with 2:4 sparsity) of *one* GPU while its models run
in FP16 on eight; both precisions are listed, of the same group as the profile of that name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak rates of one group: link one way, dense FP16 and dense FP8 (0: the GPU has none)."""

    link_bytes_per_s: float
    fp16_flops_per_s: float
    fp8_flops_per_s: float
    link: str

    def times(self, n_gpus: int) -> Peak:
        """Of a tensor-parallel group, every GPU with its own link."""
        return Peak(
            self.link_bytes_per_s * n_gpus,
            self.fp16_flops_per_s * n_gpus,
            self.fp8_flops_per_s * n_gpus,
            f"{n_gpus} x {self.link}" if n_gpus > 1 else self.link,
        )


_H100 = Peak(64e9, 989.4e12, 1979e12, "PCIe 5 x16")
_GRACE = Peak(450e9, 989.4e12, 1979e12, "NVLink-C2C")

_PEAKS = {
    "a100": Peak(32e9, 312e12, 0.0, "PCIe 4 x16"),
    "a800": Peak(32e9, 312e12, 0.0, "PCIe 4 x16"),
    "b200": Peak(64e9, 2250e12, 4500e12, "PCIe 5 x16"),
    "gh200": _GRACE,
    "gh200-measured": _GRACE,
    # 900 GB/s is the total of both ways; the paper counts it one way.
    "gh200-paper": Peak(900e9, 989.4e12, 1979e12, "NVLink-C2C, both ways"),
    "h100": _H100,
    "h100x8": _H100.times(8),
    "h100x8-paper": _H100.times(8),
    "h200": _H100,
    "h200-measured": _H100,
    "rtx3090": Peak(32e9, 71e12, 0.0, "PCIe 4 x16"),
    "t4": Peak(16e9, 65e12, 0.0, "PCIe 3 x16"),
    "unified-hbm": Peak(8e12, 2250e12, 4500e12, "unified HBM"),
}


def peak_of(name: str) -> Peak | None:
    """Peaks of a shipped profile; None for one that nobody looked up."""
    return _PEAKS.get(name)
