"""Hardware profiles: capacities, links and rates, each number with its provenance.

Readers get one thing wrong: a datasheet's link rate is often the sum of both directions. Every
rate here is one direction, in decimal bytes per second, of the whole tensor-parallel group
(``n_gpus`` GPUs act as one device; ``provenance`` says where a source quotes one GPU).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from policies.spec.curve import Curve, Grid

ProvenanceKind = Literal["datasheet", "measured", "imported", "derived", "guess"]
LEAST_PER_S, MOST_S = 1.0, 1e6  # a rate, a latency: what no machine undercuts or exceeds
PROVENANCE_KINDS = ("datasheet", "measured", "imported", "derived", "guess")


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a number comes from.

    ``imported`` is somebody else's measurement, ``derived`` follows from other numbers by the
    stated rule. ``residual`` is the relative error of a fitted curve, where one was fitted.
    """

    kind: ProvenanceKind
    source: str
    date: str = ""
    device: str = ""
    driver: str = ""
    residual: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in PROVENANCE_KINDS:
            raise ValueError(
                f"provenance kind: {self.kind!r} is none of {', '.join(PROVENANCE_KINDS)}"
            )
        if not self.source:
            raise ValueError("provenance source: is empty, say where the number comes from")


@dataclass(frozen=True, slots=True)
class Link:
    """A one-way link: ``seconds(s) = latency_s + s / bytes_per_s`` for one copy of s bytes.

    Its effective rate is ``s / (t0 + s / BW_max)`` (papers.md 6.2): small copies never reach
    ``bytes_per_s``.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.latency_s < 0:
            raise ValueError(f"latency_s: {self.latency_s} is negative, must be >= 0")
        if self.bytes_per_s <= 0:
            raise ValueError(f"bytes_per_s: {self.bytes_per_s} must be positive")

    def seconds(self, nbytes: float) -> float:
        """Duration of one uncontended copy; 0 if nothing moves."""
        return self.latency_s + nbytes / self.bytes_per_s if nbytes > 0 else 0.0

    def effective_bytes_per_s(self, nbytes: float) -> float:
        """Rate that one copy of ``nbytes`` reaches."""
        return nbytes / self.seconds(nbytes)


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One machine: a GPU (or a tensor-parallel group), its host and its disk.

    Rates: ``gemm`` is FLOP/s by rows (tokens in the GEMM); ``attention_decode`` is KV bytes/s of a
    one-query fused kernel by context; ``attention_prefill`` is FLOP/s by context, counting each
    causal pair once; ``attention_window`` is the same by (queries, context) for a short run of
    queries over a longer context. Attention by separate kernels takes ``attention_unfused_decode``
    (KV bytes/s of the first query) and ``attention_unfused_scores`` (scores/s of further queries:
    one score for each head, query and key, masked or not), both by context; where they are None,
    its passes over memory are counted instead. ``layer_norm``, ``rms_norm`` and ``rotary`` (the
    rotation of queries and keys) are bytes/s by the bytes that they read and write; where they are
    None, ``hbm_bytes_per_s`` holds. ``duplex`` multiplies the rate of H2D and D2H while
    both are busy. ``cpu_attention_bytes_per_s`` is the KV bytes/s of attention on the CPU and
    ``cpu_bytes_per_s`` the rate at which the CPU reads host memory. ``launch_s`` is the host time
    to issue one kernel, ``sync_s`` the cost of one device synchronisation.
    """

    name: str
    gpu_bytes: float
    host_bytes: float
    disk_bytes: float
    gpu_reserve_bytes: float
    host_reserve_bytes: float
    disk_reserve_bytes: float
    h2d: Link
    d2h: Link
    h2d_pageable: Link
    d2h_pageable: Link
    duplex: float
    disk_read: Link
    disk_write: Link
    host_copy: Link
    hbm_bytes_per_s: float
    gemm: Curve
    attention_decode: Curve
    attention_prefill: Curve
    attention_window: Grid
    cpu_attention_bytes_per_s: float
    cpu_bytes_per_s: float
    launch_s: float
    sync_s: float
    idle_watts: float
    tdp_watts: float
    n_gpus: int = 1
    attention_unfused_decode: Curve | None = None
    attention_unfused_scores: Curve | None = None
    layer_norm: Curve | None = None
    rms_norm: Curve | None = None
    rotary: Curve | None = None
    provenance: Mapping[str, Provenance] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (
            "gpu_bytes",
            "host_bytes",
            "hbm_bytes_per_s",
            "cpu_attention_bytes_per_s",
            "cpu_bytes_per_s",
            "idle_watts",
            "tdp_watts",
            "n_gpus",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"hardware.{name}: {getattr(self, name)} must be positive")
        for name in (
            "disk_bytes",
            "gpu_reserve_bytes",
            "host_reserve_bytes",
            "disk_reserve_bytes",
            "launch_s",
            "sync_s",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"hardware.{name}: {getattr(self, name)} must be >= 0")
        self._refuse_endless()
        if not 0.5 <= self.duplex <= 1.0:
            raise ValueError(
                f"hardware.duplex: {self.duplex} must be in [0.5, 1]: 1 is full duplex, below 0.5 "
                "taking turns would be faster"
            )
        for name in ("gpu", "host", "disk"):
            if self.usable_bytes(name) < 0:
                raise ValueError(
                    f"hardware.{name}_reserve_bytes: {getattr(self, f'{name}_reserve_bytes')} "
                    f"exceeds {name}_bytes {getattr(self, f'{name}_bytes')}"
                )
        sourced = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        missing = [name for name in sourced if name not in _UNSOURCED | set(self.provenance)]
        if self.provenance and missing:
            raise ValueError(f"hardware.provenance: no entry for {', '.join(missing)}")
        decode, prefill = self.attention_unfused_decode, self.attention_unfused_scores
        if (decode is None) is not (prefill is None):
            lacking = "attention_unfused_decode" if decode is None else "attention_unfused_scores"
            raise ValueError(
                f"hardware.{lacking}: is null, must be a curve like its counterpart: unfused "
                "attention takes both or none"
            )

    def _refuse_endless(self) -> None:
        """Refuse rates and latencies of which the seconds of a run are beyond all numbers."""
        values = [(name, getattr(self, name)) for name in self.__slots__]
        links = [(name, value) for name, value in values if isinstance(value, Link)]
        rates = [(name, value) for name, value in values if name.endswith("_per_s")]
        rates += [(f"{name}.bytes_per_s", link.bytes_per_s) for name, link in links]
        rates += [(f"{n}.y", min(curve.y)) for n, curve in values if isinstance(curve, Curve)]
        rates += [(f"{n}.z", min(map(min, g.z))) for n, g in values if isinstance(g, Grid)]
        for name, value in rates:
            if not value >= LEAST_PER_S:
                raise ValueError(f"hardware.{name}: {value} must be >= {LEAST_PER_S:g} a second")
        delays = [(f"{name}.latency_s", link.latency_s) for name, link in links]
        for name, value in [*delays, ("launch_s", self.launch_s), ("sync_s", self.sync_s)]:
            if not value <= MOST_S:
                raise ValueError(f"hardware.{name}: {value} must be <= {MOST_S:g} seconds")

    def usable_bytes(self, tier: str) -> float:
        """Capacity of ``gpu``, ``host`` or ``disk`` less its reserve."""
        capacity: float = getattr(self, f"{tier}_bytes")
        reserve: float = getattr(self, f"{tier}_reserve_bytes")
        return capacity - reserve


_UNSOURCED = {"name", "provenance"}
# Curves that a profile may lack.
OPTIONAL = (
    "attention_unfused_decode",
    "attention_unfused_scores",
    "layer_norm",
    "rms_norm",
    "rotary",
)
