"""Ops: what an offloaded job does, one immutable record at a time.

An op says *what* happens to *which* tokens and slots, never how long it takes or how many bytes it
moves: seconds, bytes and FLOPs follow from the model and the hardware in ``policies.cost``. What
readers get wrong first: ``step`` is the step an op works *for*. A weight load for step 5 may be
emitted while step 4 is still being issued, and its key says s5.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Keyword(StrEnum):
    """One of a fixed set of texts. Hashes as text does, in C: costs and slots are looked up so."""

    __hash__ = str.__hash__


class Lane(Keyword):
    """A server that runs its ops one at a time in program order."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    DISK = "disk"
    CPU = "cpu"


class Kind(Keyword):
    """What an op does; its lane follows from its kind (``LANE_OF``)."""

    READ_WEIGHT = "read_weight"  # disk -> host staging
    LOAD_WEIGHT = "load_weight"  # host -> GPU
    READ_KV = "read_kv"  # disk -> host staging
    WRITE_KV = "write_kv"  # host staging -> disk
    LOAD_KV = "load_kv"  # host -> GPU
    STORE_KV = "store_kv"  # GPU -> host
    READ_ACT = "read_act"  # disk -> host staging
    WRITE_ACT = "write_act"  # host staging -> disk
    LOAD_ACT = "load_act"  # host -> GPU
    STORE_ACT = "store_act"  # GPU -> host
    HOST_COPY = "host_copy"  # host -> host, by the CPU
    FORWARD = "forward"  # GPU compute
    CPU_ATTEND = "cpu_attend"  # attention over host KV, by the CPU
    FENCE = "fence"  # waits for everything before it, holds everything after


LANE_OF: dict[Kind, Lane] = {
    Kind.READ_WEIGHT: Lane.DISK,
    Kind.LOAD_WEIGHT: Lane.H2D,
    Kind.READ_KV: Lane.DISK,
    Kind.WRITE_KV: Lane.DISK,
    Kind.LOAD_KV: Lane.H2D,
    Kind.STORE_KV: Lane.D2H,
    Kind.READ_ACT: Lane.DISK,
    Kind.WRITE_ACT: Lane.DISK,
    Kind.LOAD_ACT: Lane.H2D,
    Kind.STORE_ACT: Lane.D2H,
    Kind.HOST_COPY: Lane.CPU,
    Kind.FORWARD: Lane.COMPUTE,
    Kind.CPU_ATTEND: Lane.CPU,
    Kind.FENCE: Lane.COMPUTE,
}


class Tier(Keyword):
    """A memory, from nearest to the GPU to farthest."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"


class Slot(NamedTuple):
    """A named buffer. Host slots are pinned (the GPU copies them by DMA) or pageable."""

    name: str
    tier: Tier
    pinned: bool = True


class Scope(Keyword):
    """Which part of a layer an op covers."""

    LAYER = "layer"  # attention and MLP
    ATTENTION = "attention"
    MLP = "mlp"
    QKV = "qkv"  # attention up to the projected queries, keys and values
    OUTPUT = "output"  # the output projection, after attention ran elsewhere
    HEAD = "head"  # final norm, LM head and sampling
    INPUT = "input"  # a layer's input, stored in place of its KV


class Attention(Keyword):
    """How a FORWARD attends: one fused kernel, separate kernels through HBM, or on the CPU."""

    FUSED = "fused"
    UNFUSED = "unfused"
    CPU = "cpu"


_FORWARD_PART = {
    Scope.LAYER: 0,
    Scope.ATTENTION: 0,
    Scope.MLP: 1,
    Scope.QKV: 2,
    Scope.OUTPUT: 3,
    Scope.HEAD: 0,
}


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a plan.

    ``layer`` runs from 0; ``layer == n_layers`` is the LM head. ``start`` and ``stop`` bound the
    token range ``[start, stop)`` that a KV or activation op moves, per sequence. A FORWARD computes
    ``n_new`` new tokens, recomputes the first ``n_front`` and the last ``n_recompute`` of ``n_ctx``
    cached ones and projects K and V of ``n_project`` from loaded layer inputs, for each of
    ``n_seqs`` sequences. Weight and KV transfers can be cut: an op carries piece
    ``part % n_parts`` of its ``scope``. For a weight transfer ``batch`` is the batch whose compute
    it hides behind.
    """

    kind: Kind
    block: int
    step: int
    layer: int = 0
    batch: int = 0
    part: int = 0
    n_parts: int = 1
    scope: Scope = Scope.LAYER
    n_seqs: int = 0
    start: int = 0
    stop: int = 0
    n_new: int = 0
    n_recompute: int = 0
    n_ctx: int = 0
    attention: Attention = Attention.FUSED
    reads: tuple[Slot, ...] = ()
    writes: tuple[Slot, ...] = ()
    n_front: int = 0
    n_project: int = 0

    @property
    def lane(self) -> Lane:
        """The server that runs this op."""
        return LANE_OF[self.kind]

    @property
    def key(self) -> str:
        """Name that is stable between simulation and device, unique in a plan.

        ``forward/g0/s3/l17/b2/p0``: block 0, step 3, layer 17, batch 2, part 0. The part of a
        FORWARD is 0 for attention or a whole layer, 1 for the MLP, 2 for QKV and 3 for the output
        projection; that of a transfer is its piece.
        """
        part = _FORWARD_PART[self.scope] if self.kind is Kind.FORWARD else self.part
        return f"{self.kind.value}/g{self.block}/s{self.step}/l{self.layer}/b{self.batch}/p{part}"
