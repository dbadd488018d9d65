"""The dry pass: what a plan will need, learned from the plan itself before anything is allocated.

A plan is deterministic, so running through its ops tells the largest amount that every slot ever
holds, which tokens each forward has to hand on for storing, and how many rows it computes. What
readers get wrong: a slot is as large as its largest use in *this* plan, not as a formula says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from policies import slots
from policies.errors import PlanError
from policies.plan.link import LinkedOp
from policies.plan.op import Attention, Kind, Op, Scope, Slot, Tier
from real.disk import staging_bytes
from real.geometry import Geometry, half
from real.names import host_slots, is_kv_home, is_relay, loaded_kv, resident_kv, stored_kv

Where = tuple[int, int, int, int]  # block, step, layer, batch


class Rows(NamedTuple):
    """Tokens that a step computes for a batch: ``[start, stop)`` of each sequence."""

    start: int
    stop: int

    @property
    def n_tokens(self) -> int:
        """Tokens of each sequence."""
        return self.stop - self.start


@dataclass(slots=True)
class Scan:
    """What the ops of one plan need. Sizes are bytes."""

    geometry: Geometry
    linked: list[LinkedOp]
    slots: dict[Slot, int] = field(default_factory=dict)  # largest amount held
    landing: dict[Slot, int] = field(default_factory=dict)  # payload beside a KV slot
    stores: dict[Where, tuple[int, int]] = field(default_factory=dict)  # tokens stored
    rows: dict[tuple[int, int, int], Rows] = field(default_factory=dict)  # block, step, batch
    streamed: set[tuple[int, Scope]] = field(default_factory=set)  # blobs that are loaded
    projected: dict[int, int] = field(default_factory=dict)  # batch: Q, K and V for the CPU
    weights_pinned: bool = True
    kv_on_disk: dict[tuple[int, int], int] = field(default_factory=dict)  # by layer and batch
    unfused: bool = False
    on_cpu: bool = False

    def max_rows(self) -> int:
        """Most rows (tokens times sequences) that a forward computes."""
        blocks = self.geometry.blocks
        return max(r.n_tokens * blocks[g].batches[b].n_seqs for (g, _, b), r in self.rows.items())

    def max_seqs(self) -> int:
        """Largest batch."""
        return max(b.n_seqs for block in self.geometry.blocks for b in block.batches)


def scan(linked: Iterable[LinkedOp], geometry: Geometry) -> Scan:
    """Run through a plan; ``PlanError`` for an op that this engine cannot execute."""
    out = Scan(geometry, list(linked))
    for item in out.linked:
        _VISIT[item.op.kind](out, item.op)
    return out


def _grow(sizes: dict[Slot, int], slot: Slot, nbytes: int) -> None:
    sizes[slot] = max(sizes.get(slot, 0), nbytes)


def _forward(out: Scan, op: Op) -> None:
    geometry = out.geometry
    elem = geometry.elem_bytes
    out.unfused |= op.attention is Attention.UNFUSED
    if op.scope is Scope.HEAD:
        return
    rows = Rows(op.n_ctx - op.n_recompute, op.n_ctx + op.n_new)
    out.rows[op.block, op.step, op.batch] = rows
    _grow(
        out.slots, slots.hidden(op.batch), rows.n_tokens * op.n_seqs * geometry.model.d_model * elem
    )
    if op.scope in (Scope.MLP, Scope.OUTPUT):
        return
    columns = geometry.columns(op.block, op.batch)
    if op.scope is Scope.QKV:
        if columns.gpu or columns.disk:
            raise PlanError(op.key, "engine: attention on the CPU needs all KV in host memory")
        heads = geometry.model.n_heads + 2 * geometry.model.n_kv_heads
        need = op.n_seqs * heads * geometry.model.head_dim * elem
        out.projected[op.batch] = max(out.projected.get(op.batch, 0), need)
    loaded, stored, resident = loaded_kv(op), stored_kv(op), resident_kv(op)
    full = rows.stop * columns.row * elem
    if resident is not None:
        _grow(out.slots, resident, rows.stop * columns.gpu * elem)
    if loaded is not None:
        _grow(out.slots, loaded, full)
    if stored is not None:
        _grow(out.slots, stored, full if loaded is None else 0)


def _load_weight(out: Scan, op: Op) -> None:
    blob = out.geometry.blob(op.layer, op.scope)
    out.streamed.add((op.layer, op.scope))
    _grow(out.slots, op.writes[0], blob.total)
    out.weights_pinned &= all(slot.pinned for slot in host_slots(op.reads))


def _read_weight(out: Scan, op: Op) -> None:
    (start, stop), _ = out.geometry.blob(op.layer, op.scope).pieces(op.part, op.n_parts)
    _grow(out.slots, op.writes[0], staging_bytes(stop - start))


def _load_kv(out: Scan, op: Op) -> None:
    columns = out.geometry.columns(op.block, op.batch)
    if columns.split:
        payload = (op.stop - op.start) * columns.streamed * out.geometry.elem_bytes
        _grow(out.landing, op.writes[0], payload)


def _store_kv(out: Scan, op: Op) -> None:
    columns = out.geometry.columns(op.block, op.batch)
    elem = out.geometry.elem_bytes
    out.stores[op.block, op.step, op.layer, op.batch] = (op.start, op.stop)
    _grow(out.slots, op.reads[0], op.stop * columns.row * elem)
    if columns.split:
        _grow(out.landing, op.reads[0], (op.stop - op.start) * columns.streamed * elem)
    _homes(out, op)


def _homes(out: Scan, op: Op) -> None:
    """Host slots that a KV op writes: a home, staging on the way to disk, or a relay."""
    columns, elem = out.geometry.columns(op.block, op.batch), out.geometry.elem_bytes
    tokens = op.stop - op.start
    for slot in host_slots(op.writes):
        if is_kv_home(slot):
            _grow(out.slots, slot, op.stop * columns.host * elem)
        elif is_relay(slot):
            low, high = half(tokens * columns.streamed * elem, op.part, op.n_parts)
            _grow(out.slots, slot, high - low)
        else:
            _grow(out.slots, slot, staging_bytes(tokens * columns.disk * elem))


def _on_disk(out: Scan, op: Op) -> None:
    columns = out.geometry.columns(op.block, op.batch)
    where, need = (op.layer, op.batch), op.stop * columns.disk * out.geometry.elem_bytes
    out.kv_on_disk[where] = max(out.kv_on_disk.get(where, 0), need)
    if op.kind is Kind.READ_KV:
        _homes(out, op)


def _move_act(out: Scan, op: Op) -> None:
    nbytes = out.geometry.act_elems(op) * out.geometry.elem_bytes
    for slot in (*op.reads, *op.writes):
        if slot.tier is Tier.HOST or slot == slots.attended(op.batch):
            _grow(out.slots, slot, nbytes)


def _cpu_attend(out: Scan, op: Op) -> None:  # noqa: ARG001  # one signature for all kinds
    out.on_cpu = True


def _nothing(out: Scan, op: Op) -> None:
    """A fence holds nothing."""


def _refuse(out: Scan, op: Op) -> None:  # noqa: ARG001
    raise PlanError(op.key, f"engine: {op.kind} is not supported")


_VISIT = {
    Kind.READ_WEIGHT: _read_weight,
    Kind.LOAD_WEIGHT: _load_weight,
    Kind.READ_KV: _on_disk,
    Kind.WRITE_KV: _on_disk,
    Kind.LOAD_KV: _load_kv,
    Kind.STORE_KV: _store_kv,
    Kind.READ_ACT: _refuse,
    Kind.WRITE_ACT: _refuse,
    Kind.LOAD_ACT: _move_act,
    Kind.STORE_ACT: _move_act,
    Kind.HOST_COPY: _homes,
    Kind.FORWARD: _forward,
    Kind.CPU_ATTEND: _cpu_attend,
    Kind.FENCE: _nothing,
}
