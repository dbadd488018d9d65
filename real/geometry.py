"""Sizes of everything that moves: which bytes of a blob or of a row have which home.

A row is one token of all sequences of a batch: its KV, ``sequences * 2 * kv_heads * head_dim``
elements, or its layer input, ``sequences * d_model``. Homes split its columns: first the GPU's,
then the host's, then the disk's; with whole sequences a home, columns are sequences. What readers
get wrong: *payload* is what crosses the link, host columns of all tokens first and disk columns
behind them, each contiguous in its home. Only a row that is split needs a landing buffer on the
GPU, because only there payload and rows differ.

A share that cuts a row between two elements is rounded to one, so a payload may differ from the
plan's bytes by less than an element a token; with whole sequences they are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from policies.cost.size import act_elems
from policies.homes import Source
from policies.placement import Placement
from policies.plan.op import Op, Scope
from policies.spec.model import ModelSpec
from policies.spec.workload import Block

PAGE_BYTES = 4096  # what O_DIRECT wants offsets, lengths and addresses to be multiples of


class Columns(NamedTuple):
    """Elements of a row by home."""

    gpu: int
    host: int
    disk: int

    @property
    def row(self) -> int:
        """Elements of a row."""
        return self.gpu + self.host + self.disk

    @property
    def streamed(self) -> int:
        """Elements of a row that cross the link."""
        return self.host + self.disk

    @property
    def split(self) -> bool:
        """Whether a payload needs a landing buffer: it is not simply rows."""
        return self.streamed > 0 and self.row not in (self.host, self.disk)


class Blob(NamedTuple):
    """Streamed bytes of a scope of a layer: ``[0, disk)`` on disk, the rest in host memory."""

    total: int
    disk: int

    @property
    def host(self) -> int:
        """Bytes in host memory."""
        return self.total - self.disk

    def pieces(self, part: int, n_parts: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Byte ranges ``(disk, host)`` of piece ``part % n_parts``, as positions in the blob.

        Both sum to what ``policies.cost.size.piece`` says for the total and for the disk.
        """
        i = part % n_parts
        on_disk = [self.disk * k // n_parts for k in (i, i + 1)]
        both = [self.total * k // n_parts for k in (i, i + 1)]
        first, last = (self.disk + b - d for b, d in zip(both, on_disk, strict=True))
        return (on_disk[0], on_disk[1]), (first, last)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one run: a model in a dtype, a placement, the blocks that run."""

    model: ModelSpec
    placement: Placement
    blocks: tuple[Block, ...]
    dtype: torch.dtype

    @property
    def elem_bytes(self) -> int:
        """Bytes of one element."""
        return int(self.dtype.itemsize)

    @property
    def kv_elems(self) -> int:
        """Elements of one token of one sequence in one layer."""
        return self.model.kv_elems_per_token_layer

    def columns(self, block: int, batch: int, source: Source = Source.KV) -> Columns:
        """Split by home of a batch's row: of KV, or of layer inputs."""
        width = self.kv_elems if source is Source.KV else self.model.d_model
        row = self.blocks[block].batches[batch].n_seqs * width
        shares = self.placement.kv[block]
        gpu, disk = round(row * shares.gpu), round(row * shares.disk)
        return Columns(gpu, row - gpu - disk, disk)

    def blob(self, layer: int, scope: Scope) -> Blob:
        """Streamed bytes of a scope of a layer."""
        total = self.placement.streamed_bytes(self.model, layer, scope)
        return Blob(total, self.placement.weight_bytes(self.model, layer, scope, "disk"))

    def act_elems(self, op: Op) -> int:
        """Elements that an activation op moves, inputs apart."""
        tokens = op.n_seqs * (op.stop - op.start)
        share = self.placement.act.streamed if op.scope is Scope.LAYER else 1.0
        return round(tokens * act_elems(self.model, op.scope) * share)


def half(total: int, part: int, n_parts: int) -> tuple[int, int]:
    """Range of piece ``part % n_parts`` of ``total`` elements."""
    i = part % n_parts
    return total * i // n_parts, total * (i + 1) // n_parts


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
