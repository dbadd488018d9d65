"""A machine with more or less of one resource, and machines as they may really be.

What readers get wrong: a resource is not a number of the profile. A faster link is faster in both
directions and from pageable memory too; its latency stays. Capacities are known exactly, so only
rates and latencies are uncertain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields

import numpy as np

from policies.spec.factors import with_factors
from policies.spec.hardware import PROVENANCE_KINDS, HardwareProfile

# What is scaled together, and whether it is a capacity (in bytes) or rates.
RESOURCES: Mapping[str, tuple[str, ...]] = {
    "link": ("h2d", "d2h", "h2d_pageable", "d2h_pageable"),
    "compute": ("gemm", "attention_prefill", "attention_window"),
    "hbm": ("hbm_bytes_per_s", "attention_decode", "attention_unfused_decode",
            "attention_unfused_scores", "layer_norm", "rms_norm", "rotary"),
    "host_cpu": ("host_copy", "cpu_attention_bytes_per_s", "cpu_bytes_per_s"),
    "disk": ("disk_read", "disk_write"),
    "gpu_memory": ("gpu_bytes",),
    "host_memory": ("host_bytes",),
}  # fmt: skip
CAPACITIES = ("gpu_memory", "host_memory")
# Relative standard deviations of numbers whose provenance states no residual: by how they were
# found. They are judgements: repeated measurements differ by a few per cent, another machine of the
# same kind by ten to twenty, and a guess may be off by a third.
SIGMA_BY_KIND: Mapping[str, float] = {
    "measured": 0.05,
    "datasheet": 0.10,
    "imported": 0.15,
    "derived": 0.20,
    "guess": 0.30,
}
_CERTAIN = {
    "name", "provenance", "gpu_bytes", "host_bytes", "disk_bytes", "gpu_reserve_bytes",
    "host_reserve_bytes", "disk_reserve_bytes", "n_gpus", "idle_watts", "tdp_watts",
}  # fmt: skip
UNCERTAIN = tuple(f.name for f in fields(HardwareProfile) if f.name not in _CERTAIN)


def scaled(hardware: HardwareProfile, resource: str, factor: float) -> HardwareProfile:
    """``hardware`` with ``factor`` times as much of ``resource``; reserves stay as they are."""
    if resource not in RESOURCES:
        raise ValueError(f"resource: {resource!r} is none of {', '.join(RESOURCES)}")
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"factor: {factor} must be a finite number > 0")
    return with_factors(hardware, dict.fromkeys(RESOURCES[resource], factor))


def sigmas(hardware: HardwareProfile, by_kind: Mapping[str, float]) -> dict[str, float]:
    """Relative standard deviation of every rate: its stated residual, else that of its kind.

    A profile without provenance counts as guessed. ``ValueError`` for kinds that do not exist.
    """
    for kind, sigma in by_kind.items():
        if kind not in PROVENANCE_KINDS:
            raise ValueError(f"sigma.{kind}: is none of {', '.join(PROVENANCE_KINDS)}")
        if not (sigma >= 0 and math.isfinite(sigma)):
            raise ValueError(f"sigma.{kind}: {sigma} must be a finite number >= 0")
    of_kind = {**SIGMA_BY_KIND, **by_kind}
    found: dict[str, float] = {}
    for name in UNCERTAIN:
        entry = hardware.provenance.get(name)
        known = entry.residual if entry is not None else None
        found[name] = of_kind[entry.kind if entry else "guess"] if known is None else known
    return found


def draw(
    hardware: HardwareProfile, deviations: Mapping[str, float], rng: np.random.Generator
) -> dict[str, float]:
    """Independent log-normal factors of every rate it has, one possible truth about ``hardware``.

    The duplex factor is drawn again until the result lies in its domain [0.5, 1].
    """
    known = (name for name in UNCERTAIN if getattr(hardware, name) is not None)
    factors = {n: math.exp(deviations[n] * rng.standard_normal()) for n in known}
    while not 0.5 <= hardware.duplex * factors["duplex"] <= 1.0:
        factors["duplex"] = math.exp(deviations["duplex"] * rng.standard_normal())
    return factors
