"""The dry pass: what a plan will need, learned from the plan itself before anything is allocated.

A plan is deterministic, so running through its ops tells the largest amount that every slot ever
holds, which tokens each forward has to hand on for storing, and how many rows it computes. What
readers get wrong: a slot is as large as its largest use in *this* plan, not as a formula says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from policies import slots
from policies.errors import PlanError
from policies.homes import Source
from policies.plan.link import LinkedOp
from policies.plan.op import Attention, Kind, Op, Scope, Slot, Tier
from real.cpu_attention import chunk_tokens, wide_dtype
from real.disk import staging_bytes
from real.geometry import Columns, Geometry, half
from real.homes import Ranges, Tokens, home_region, source_of
from real.names import (
    host_slots,
    is_home,
    is_relay,
    loaded_inputs,
    loaded_kv,
    resident_kv,
    stored_kv,
)

Where = tuple[int, int, int, int]  # block, step, layer, batch


class Rows(NamedTuple):
    """Tokens that a step computes of each sequence of a batch: the tail ``[start, stop)`` and, in
    front of it among the rows of hidden states, the first ``n_front``.
    """

    start: int
    stop: int
    n_front: int = 0

    @property
    def n_tokens(self) -> int:
        """Tokens of each sequence."""
        return self.n_front + self.stop - self.start

    @property
    def parts(self) -> tuple[tuple[Tokens, Tokens], ...]:
        """Neighbouring tokens and their rows: of the tail, and of the front if there is one."""
        front, rest = Tokens(0, self.n_front), Tokens(self.n_front, self.n_tokens)
        tail = (Tokens(self.start, self.stop), rest)
        return (tail, (front, front)) if self.n_front else (tail,)


@dataclass(slots=True)
class Scan:
    """What the ops of one plan need. Sizes are bytes."""

    geometry: Geometry
    linked: list[LinkedOp]
    slots: dict[Slot, int] = field(default_factory=dict)  # largest amount held
    landing: dict[Slot, int] = field(default_factory=dict)  # payload beside a KV slot
    homes: dict[tuple[Source, int, int, int], Ranges] = field(default_factory=dict)
    loads: dict[tuple[Source, Where], Ranges] = field(default_factory=dict)
    stores: dict[tuple[Source, Where], Ranges] = field(default_factory=dict)
    rows: dict[tuple[int, int, int], Rows] = field(default_factory=dict)  # block, step, batch
    inputs: dict[tuple[int, int, int], tuple[Tokens, ...]] = field(default_factory=dict)  # the same
    streamed: set[tuple[int, Scope]] = field(default_factory=set)  # blobs that are loaded
    projected: dict[int, int] = field(default_factory=dict)  # batch: Q, K and V for the CPU
    weights_pinned: bool = True
    on_disk: dict[str, int] = field(default_factory=dict)  # by region
    unfused: bool = False
    widened: int = 0  # elements of KV that CPU attention widens at a time

    def max_rows(self) -> int:
        """Most rows (tokens times sequences) that a forward computes."""
        blocks = self.geometry.blocks
        return max(r.n_tokens * blocks[g].batches[b].n_seqs for (g, _, b), r in self.rows.items())

    def columns(self, op: Op) -> Columns:
        """Split by home of the rows that a KV or input op moves."""
        return self.geometry.columns(op.block, op.batch, source_of(op))

    def home_row(self, op: Op) -> int:
        """Row of its home at which a KV or input op starts; ``PlanError`` if nothing stored it."""
        ranges = self.homes.get((source_of(op), op.block, op.layer, op.batch), Ranges())
        row = ranges.row(op.start, op.stop)
        if row is None:
            raise PlanError(
                op.key,
                f"engine: tokens {op.start}..{op.stop} are not all stored as {source_of(op)}",
            )
        return row

    def slot_row(self, op: Op) -> int:
        """Row of its GPU slot at which a KV or input op starts.

        KV lies at the tokens' positions; inputs of a step lie one behind the other.
        """
        if source_of(op) is Source.KV:
            return op.start
        moved = self.loads if op.kind is Kind.LOAD_ACT else self.stores
        row = moved[Source.INPUT, where(op)].row(op.start, op.stop)
        if row is None:
            raise PlanError(op.key, "engine: inputs of a step move in order and once")
        return row

    def moved(self, moves: dict[tuple[Source, Where], Ranges], source: Source, op: Op) -> Ranges:
        """What the step of a forward loads, or stores, for its layer and batch."""
        return moves.get((source, where(op)), Ranges())

    def max_seqs(self) -> int:
        """Largest batch."""
        return max(b.n_seqs for block in self.geometry.blocks for b in block.batches)


def where(op: Op) -> Where:
    """What a layer of a batch does in a step is found by these."""
    return op.block, op.step, op.layer, op.batch


def scan(linked: Iterable[LinkedOp], geometry: Geometry) -> Scan:
    """Run through a plan; ``PlanError`` for an op that this engine cannot execute."""
    out = Scan(geometry, [])
    extend(out, linked)
    return out


def extend(out: Scan, linked: Iterable[LinkedOp]) -> list[LinkedOp]:
    """Run through the next ops of a plan; they are returned."""
    items = list(linked)
    out.linked += items
    for item in items:
        _VISIT[item.op.kind](out, item.op)
    return items


def envelope(scans: Sequence[Scan]) -> Scan:
    """What any one of several plans for the same job needs; its ops are one forward a shape."""
    out = Scan(scans[0].geometry, [])
    shapes: dict[object, LinkedOp] = {}
    for found in scans:
        for mine, sizes in ((out.slots, found.slots), (out.landing, found.landing)):
            for slot, nbytes in sizes.items():
                _grow(mine, slot, nbytes)
        for region, nbytes in found.on_disk.items():
            out.on_disk[region] = max(out.on_disk.get(region, 0), nbytes)
        for batch, nbytes in found.projected.items():
            out.projected[batch] = max(out.projected.get(batch, 0), nbytes)
        for step, rows in found.rows.items():
            # Rows computed and tokens projected count together: where one is most, none is other.
            if _made(found, step) >= _made(out, step):
                out.rows[step], out.inputs[step] = rows, found.inputs.get(step, ())
        out.streamed |= found.streamed
        out.weights_pinned &= found.weights_pinned
        out.unfused |= found.unfused
        out.widened = max(out.widened, found.widened)
        for item in found.linked:
            if item.op.kind is Kind.FORWARD:
                shapes.setdefault(shape_of(item.op), item)
    out.linked = list(shapes.values())
    return out


def _made(found: Scan, step: tuple[int, int, int]) -> tuple[int, int]:
    """Tokens whose K and V a step makes, and those of them that it computes."""
    rows = found.rows.get(step)
    computed = 0 if rows is None else rows.n_tokens
    return computed + sum(t.n_tokens for t in found.inputs.get(step, ())), computed


def check_within(found: Scan, booked: Scan) -> None:
    """``ValueError`` if a plan needs a buffer, or more of one, than was allocated."""
    for name in ("slots", "landing", "on_disk", "projected"):
        held = getattr(booked, name)
        for key, nbytes in getattr(found, name).items():
            if nbytes > held.get(key, 0):
                raise ValueError(
                    f"engine: the plan needs {nbytes} bytes of {key}, the plans before the run "
                    f"needed {held.get(key, 0)}"
                )
    if found.rows and found.max_rows() > booked.max_rows():
        raise ValueError(
            f"engine: the plan computes {found.max_rows()} rows, the plans before the run "
            f"{booked.max_rows()}"
        )
    if not found.streamed <= booked.streamed or found.widened > booked.widened:
        raise ValueError("engine: the plan streams weights or attends unlike those before the run")


def shape_of(op: Op) -> tuple[object, ...]:
    """What the shapes in a forward depend on, its weights apart."""
    return (op.scope, op.attention, op.n_seqs, op.n_new, op.n_recompute, op.n_ctx, op.n_front,
            op.n_project)  # fmt: skip


def _grow(sizes: dict[Slot, int], slot: Slot, nbytes: int) -> None:
    sizes[slot] = max(sizes.get(slot, 0), nbytes)


def _forward(out: Scan, op: Op) -> None:
    geometry = out.geometry
    elem = geometry.elem_bytes
    out.unfused |= op.attention is Attention.UNFUSED
    if op.scope is Scope.HEAD:
        return
    rows = rows_of(op)
    if op.n_front and geometry.placement.act.host > 0:
        raise PlanError(op.key, "engine: hidden states of a front cannot live in host memory")
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
    else:
        _projections(out, op)
    loaded, stored, resident = loaded_kv(op), stored_kv(op), resident_kv(op)
    full = rows.stop * columns.row * elem
    if resident is not None:
        _grow(out.slots, resident, rows.stop * columns.gpu * elem)
    if loaded is not None:
        _grow(out.slots, loaded, full)
    if stored is not None:
        _grow(out.slots, stored, full if loaded is None else 0)


def rows_of(op: Op) -> Rows:
    """Tokens that a forward computes."""
    rows = Rows(op.n_ctx - op.n_recompute, op.n_ctx + op.n_new, op.n_front)
    if not 0 <= rows.n_front <= rows.start:
        raise PlanError(op.key, f"engine: a front of {op.n_front} tokens reaches into the tail")
    return rows


def _projections(out: Scan, op: Op) -> None:
    """Inputs that a forward projects: those loaded for it, the same ones in all layers."""
    loaded = tuple(out.moved(out.loads, Source.INPUT, op).spans)
    count = sum(tokens.n_tokens for tokens in loaded)
    if count != op.n_project or (count > 0) != (loaded_inputs(op) is not None):
        raise PlanError(op.key, f"engine: projects {op.n_project} tokens, {count} are loaded")
    if loaded != out.inputs.setdefault((op.block, op.step, op.batch), loaded):
        raise PlanError(op.key, "engine: layers of a step project different tokens")


def _load_weight(out: Scan, op: Op) -> None:
    blob = out.geometry.blob(op.layer, op.scope)
    out.streamed.add((op.layer, op.scope))
    _grow(out.slots, op.writes[0], blob.total)
    out.weights_pinned &= all(slot.pinned for slot in host_slots(op.reads))


def _read_weight(out: Scan, op: Op) -> None:
    (start, stop), _ = out.geometry.blob(op.layer, op.scope).pieces(op.part, op.n_parts)
    _grow(out.slots, op.writes[0], staging_bytes(stop - start))


def _load(out: Scan, op: Op) -> None:
    _note(out, out.loads, op)
    _transfer_buffers(out, op, op.writes[0])


def _store(out: Scan, op: Op) -> None:
    _note(out, out.stores, op)
    key = (source_of(op), op.block, op.layer, op.batch)
    _add(op, out.homes.setdefault(key, Ranges()))
    _transfer_buffers(out, op, op.reads[0])
    _homes(out, op)


def _note(out: Scan, moves: dict[tuple[Source, Where], Ranges], op: Op) -> None:
    source = source_of(op)
    if source is Source.INPUT and out.columns(op).gpu:
        raise PlanError(op.key, "engine: layer inputs need a placement without KV on the GPU")
    _add(op, moves.setdefault((source, where(op)), Ranges()))


def _add(op: Op, ranges: Ranges) -> None:
    try:
        ranges.add(op.start, op.stop)
    except ValueError as error:
        raise PlanError(op.key, f"engine: {error}") from error


def _transfer_buffers(out: Scan, op: Op, slot: Slot) -> None:
    """The GPU side of a KV or input op. A load's KV slot is sized by the forward that reads it."""
    columns, elem, tokens = out.columns(op), out.geometry.elem_bytes, op.stop - op.start
    if op.kind is not Kind.LOAD_KV:
        _grow(out.slots, slot, (out.slot_row(op) + tokens) * columns.row * elem)
    if columns.split:
        _grow(out.landing, slot, tokens * columns.streamed * elem)


def _homes(out: Scan, op: Op) -> None:
    """Host slots that a KV or input op writes: a home, staging on the way to disk, or a relay."""
    columns, elem = out.columns(op), out.geometry.elem_bytes
    tokens = op.stop - op.start
    for slot in host_slots(op.writes):
        if is_home(slot):
            _grow(out.slots, slot, (out.home_row(op) + tokens) * columns.host * elem)
        elif is_relay(slot):
            low, high = half(tokens * columns.streamed * elem, op.part, op.n_parts)
            _grow(out.slots, slot, high - low)
        else:
            _grow(out.slots, slot, staging_bytes(tokens * columns.disk * elem))


def _on_disk(out: Scan, op: Op) -> None:
    if op.kind in (Kind.READ_ACT, Kind.WRITE_ACT) and op.scope is not Scope.INPUT:
        raise PlanError(op.key, f"engine: {op.kind} of {op.scope} is not supported")
    rows = out.home_row(op) + op.stop - op.start
    region, need = home_region(op), rows * out.columns(op).disk * out.geometry.elem_bytes
    out.on_disk[region] = max(out.on_disk.get(region, 0), need)
    if op.kind in (Kind.READ_KV, Kind.READ_ACT):
        _homes(out, op)


def _move_act(out: Scan, op: Op) -> None:
    if op.scope is Scope.INPUT:
        (_load if op.kind is Kind.LOAD_ACT else _store)(out, op)
        return
    nbytes = out.geometry.act_elems(op) * out.geometry.elem_bytes
    for slot in (*op.reads, *op.writes):
        if slot.tier is Tier.HOST or slot == slots.attended(op.batch):
            _grow(out.slots, slot, nbytes)


def _cpu_attend(out: Scan, op: Op) -> None:
    row, dtype = out.geometry.columns(op.block, op.batch).row, out.geometry.dtype
    kept = out.homes.get((Source.KV, op.block, op.layer, op.batch), Ranges())
    if op.n_recompute or kept.row(0, op.n_ctx) != 0:
        raise PlanError(op.key, "engine: attention on the CPU needs the KV of all cached tokens")
    if dtype is not wide_dtype(dtype):
        out.widened = max(out.widened, chunk_tokens(op.n_ctx, row, dtype) * row)


def _nothing(out: Scan, op: Op) -> None:
    """A fence holds nothing."""


_VISIT = {
    Kind.READ_WEIGHT: _read_weight,
    Kind.LOAD_WEIGHT: _load_weight,
    Kind.READ_KV: _on_disk,
    Kind.WRITE_KV: _on_disk,
    Kind.LOAD_KV: _load,
    Kind.STORE_KV: _store,
    Kind.READ_ACT: _on_disk,
    Kind.WRITE_ACT: _on_disk,
    Kind.LOAD_ACT: _move_act,
    Kind.STORE_ACT: _move_act,
    Kind.HOST_COPY: _homes,
    Kind.FORWARD: _forward,
    Kind.CPU_ATTEND: _cpu_attend,
    Kind.FENCE: _nothing,
}
