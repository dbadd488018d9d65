"""Transfers as closures: each op becomes a few copies between views that exist already.

A copy moves flat bytes between lists of segments of equal length, cut where either side is. Almost
always that is one segment on each side, so one ``memcpy``. What readers get wrong: from pinned
memory a copy is only issued, from pageable memory it blocks the lane's thread, as it does in every
system that leaves its memory pageable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from policies.plan.op import Kind, Op, Scope, Slot, Tier
from real.buffers import Buffers
from real.disk import DiskStore
from real.geometry import Columns, half
from real.homes import home_region, source_of
from real.names import host_slots, is_home, is_relay, is_staging
from real.scan import where
from real.weights import region

Run = Callable[[], object]


class Transfers:
    """Makes the closures of everything that is not compute."""

    def __init__(self, buffers: Buffers, *, poison: bool) -> None:
        self._b, self._poison = buffers, poison
        self._owner: dict[Slot, object] = {}  # what a slot was last loaded for
        self._make: dict[Kind, Callable[[Op], Run]] = {
            Kind.READ_WEIGHT: self._read_weight,
            Kind.LOAD_WEIGHT: self._load_weight,
            Kind.READ_KV: self._read_rows,
            Kind.WRITE_KV: self._write_rows,
            Kind.LOAD_KV: self._load_rows,
            Kind.STORE_KV: self._store_rows,
            Kind.READ_ACT: self._read_rows,
            Kind.WRITE_ACT: self._write_rows,
            Kind.LOAD_ACT: self._move_act,
            Kind.STORE_ACT: self._move_act,
            Kind.HOST_COPY: self._host_copy,
            Kind.FENCE: lambda _op: _nothing,
        }

    def make(self, op: Op) -> Run:
        """The closure of an op."""
        return self._make[op.kind](op)

    @property
    def kinds(self) -> frozenset[Kind]:
        """Kinds that are transfers."""
        return frozenset(self._make)

    # ---- weights --------------------------------------------------------------------------

    def _read_weight(self, op: Op) -> Run:
        (start, stop), _ = self._b.geometry.blob(op.layer, op.scope).pieces(op.part, op.n_parts)
        staging = self._b.slots[op.writes[0]]
        read = self._disk.reader(region(op.layer, op.scope), start, stop - start, staging)
        return self._after_poison([staging], read)

    def _load_weight(self, op: Op) -> Run:
        blob = self._b.geometry.blob(op.layer, op.scope)
        disk, host = blob.pieces(op.part, op.n_parts)
        slot = self._b.slots[op.writes[0]]
        copies = []
        if disk[1] > disk[0]:
            staged = next(s for s in host_slots(op.reads) if is_staging(s))
            where, length = region(op.layer, op.scope), disk[1] - disk[0]
            source = self._disk.staged(where, disk[0], length, self._b.slots[staged])
            copies.append((slot[disk[0] : disk[1]], source))
        if host[1] > host[0]:
            held = self._b.blob(op.layer, op.scope)
            source = held[host[0] - blob.disk : host[1] - blob.disk]
            copies.append((slot[host[0] : host[1]], source))
        first = self._is_first(op.writes[0], (op.block, op.step, op.layer, op.scope))
        run = _copier(copies, asynchronous=self._is_pinned(op.reads))
        return self._after_poison([slot] if first else [], run)

    # ---- KV and layer inputs ----------------------------------------------------------------

    def _read_rows(self, op: Op) -> Run:
        staging = self._b.slots[op.writes[0]]
        where, start, length = self._on_disk(op)
        return self._after_poison([staging], self._disk.reader(where, start, length, staging))

    def _write_rows(self, op: Op) -> Run:
        where, start, length = self._on_disk(op)
        return self._disk.writer(where, start, length, self._b.slots[op.reads[0]])

    def _load_rows(self, op: Op) -> Run:
        columns, slot = self._columns(op), op.writes[0]
        low, high = half(self._payload_bytes(op), op.part, op.n_parts)
        relay = self._relay(op.reads)
        sources = [relay[: high - low]] if relay is not None else self._home(op, op.reads)
        target = self._target(op, slot, columns)
        run = _copier(pair([target[low:high]], sources), asynchronous=self._is_pinned(op.reads))
        last = op.part % op.n_parts == op.n_parts - 1
        if columns.split and last:
            run = _sequence(run, _copier(self._rows_of_payload(op, slot), asynchronous=False))
        first = self._is_first(slot, where(op))
        return self._after_poison([self._b.slots[slot]] if first else [], run)

    def _is_first(self, slot: Slot, owner: object) -> bool:
        """Whether a load is the first of those that fill a slot for ``owner``."""
        before, self._owner[slot] = self._owner.get(slot), owner
        return before != owner

    def _store_rows(self, op: Op) -> Run:
        columns, slot = self._columns(op), op.reads[0]
        low, high = half(self._payload_bytes(op), op.part, op.n_parts)
        relay = self._relay(op.writes)
        targets = [relay[: high - low]] if relay is not None else self._home(op, op.writes)
        source = self._target(op, slot, columns)
        run = _copier(pair(targets, [source[low:high]]), asynchronous=self._is_pinned(op.writes))
        if columns.split and op.part % op.n_parts == 0:
            gather = [(payload, rows) for rows, payload in self._rows_of_payload(op, slot)]
            run = _sequence(_copier(gather, asynchronous=False), run)
        return run

    def _host_copy(self, op: Op) -> Run:
        low, high = half(self._payload_bytes(op), op.part, op.n_parts)
        relay = self._relay(op.writes)
        if relay is not None:  # towards the GPU
            sources = cut(self._home(op, op.reads), low, high)
            run = _copier(pair([relay[: high - low]], sources), asynchronous=False)
            return self._after_poison([relay], run)
        relay = self._relay(op.reads)
        if relay is None:
            raise ValueError(f"plan: {op.key} copies neither to nor from a relay")
        targets = cut(self._home(op, op.writes), low, high)
        return _copier(pair(targets, [relay[: high - low]]), asynchronous=False)

    def _columns(self, op: Op) -> Columns:
        return self._b.found.columns(op)

    def _payload_bytes(self, op: Op) -> int:
        elems = (op.stop - op.start) * self._columns(op).streamed
        return elems * self._b.geometry.elem_bytes

    def _home(self, op: Op, slots: Sequence[Slot]) -> list[Tensor]:
        """The payload of an op where it lives: host columns, then disk columns in staging."""
        columns, elem = self._columns(op), self._b.geometry.elem_bytes
        first = self._b.found.home_row(op)
        segments = []
        for slot in host_slots(slots):
            data = self._b.slots.get(slot)
            if is_home(slot) and columns.host and data is not None:
                width = columns.host * elem
                segments.append(data[first * width : (first + op.stop - op.start) * width])
        segments += [
            self._disk.staged(*self._on_disk(op), self._b.slots[slot])
            for slot in host_slots(slots)
            if not is_home(slot) and columns.disk
        ]
        return segments

    def _on_disk(self, op: Op) -> tuple[str, int, int]:
        """Region, first byte and length of an op's disk columns."""
        width = self._columns(op).disk * self._b.geometry.elem_bytes
        first = self._b.found.home_row(op)
        return home_region(op), first * width, (op.stop - op.start) * width

    def _relay(self, slots: Sequence[Slot]) -> Tensor | None:
        found = next((s for s in host_slots(slots) if is_relay(s)), None)
        return None if found is None else self._b.slots[found]

    def _target(self, op: Op, slot: Slot, columns: Columns) -> Tensor:
        """The payload on the GPU, flat bytes: rows of the slot, or the landing buffer."""
        if columns.split:
            return self._b.landing[slot][: self._payload_bytes(op)]
        return self._rows(op, slot).view(-1).view(torch.uint8)

    def _rows(self, op: Op, slot: Slot) -> Tensor:
        """Rows ``[tokens, row]`` of a GPU slot that an op fills or empties."""
        first = self._b.found.slot_row(op)
        rows = self._b.rows(slot, op.block, op.batch, source_of(op))
        return rows[first : first + op.stop - op.start]

    def _rows_of_payload(self, op: Op, slot: Slot) -> list[tuple[Tensor, Tensor]]:
        """Columns of the slot's rows and the part of the landing buffer that belongs there."""
        columns, n = self._columns(op), op.stop - op.start
        rows = self._rows(op, slot)  # [n, row]
        payload = self._b.typed(self._b.landing[slot])
        on_host, both = columns.gpu + columns.host, n * columns.streamed
        parts = [
            (rows[:, columns.gpu : on_host], payload[: n * columns.host].view(n, columns.host)),
            (rows[:, on_host:], payload[n * columns.host : both].view(n, columns.disk)),
        ]
        return [(target, source) for target, source in parts if source.numel()]

    # ---- activations ----------------------------------------------------------------------

    def _move_act(self, op: Op) -> Run:
        if op.scope is Scope.INPUT:
            return (self._load_rows if op.kind is Kind.LOAD_ACT else self._store_rows)(op)
        nbytes = self._b.geometry.act_elems(op) * self._b.geometry.elem_bytes
        host = next(s for s in (*op.reads, *op.writes) if s.tier is Tier.HOST)
        on_host = self._b.slots[host][:nbytes]
        gpu = self._gpu_act(op)[:nbytes]
        pinned = self._is_pinned([host])
        if op.kind is Kind.LOAD_ACT:
            return _copier([(gpu, on_host)], asynchronous=pinned)
        run = _copier([(on_host, gpu)], asynchronous=pinned)
        if self._poison and not self._projects(op):
            return _sequence(run, partial(gpu.fill_, 255))
        return run

    def _gpu_act(self, op: Op) -> Tensor:
        if self._projects(op):
            return self._b.projected[op.batch].view(torch.uint8)
        slots = op.writes if op.kind is Kind.LOAD_ACT else op.reads
        return self._b.slots[slots[0]]

    @staticmethod
    def _projects(op: Op) -> bool:
        """Whether the op brings Q, K and V to the CPU."""
        return op.kind is Kind.STORE_ACT and len(op.reads) == 2

    # ---- how ------------------------------------------------------------------------------

    @property
    def _disk(self) -> DiskStore:
        if self._b.disk is None:
            raise ValueError("plan: uses the disk, but the run has no disk folder")
        return self._b.disk

    def _is_pinned(self, slots: Sequence[Slot]) -> bool:
        """Whether a copy may return before it is done: the GPU reads or writes pinned memory."""
        return self._b.device.type == "cuda" and all(slot.pinned for slot in host_slots(slots))

    def _after_poison(self, targets: Sequence[Tensor], run: Run) -> Run:
        if not self._poison or not targets:
            return run
        return _sequence(*(partial(target.fill_, 255) for target in targets), run)


def cut(segments: Sequence[Tensor], low: int, high: int) -> list[Tensor]:
    """Elements ``[low, high)`` of flat segments that follow one another."""
    out, at = [], 0
    for segment in segments:
        start, stop = max(low - at, 0), min(high - at, segment.numel())
        if start < stop:
            out.append(segment[start:stop])
        at += segment.numel()
    return out


def pair(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pieces of both lists that lie opposite each other; ``ValueError`` if lengths differ."""
    totals = [sum(t.numel() for t in segments) for segments in (targets, sources)]
    if totals[0] != totals[1]:
        raise ValueError(f"copy: {totals[1]} bytes do not fit a target of {totals[0]}")
    marks = sorted({*_ends(targets), *_ends(sources)})
    out, low = [], 0
    for high in marks:
        if high > low:
            out.append((cut(targets, low, high)[0], cut(sources, low, high)[0]))
        low = high
    return out


def _ends(segments: Sequence[Tensor]) -> Iterator[int]:
    at = 0
    for segment in segments:
        at += segment.numel()
        yield at


def _copier(copies: Sequence[tuple[Tensor, Tensor]], *, asynchronous: bool) -> Run:
    """A closure that makes the copies, in order."""
    calls = [partial(target.copy_, source, asynchronous) for target, source in copies]
    return calls[0] if len(calls) == 1 else _sequence(*calls)


def _sequence(*runs: Run) -> Run:
    def run() -> None:
        for each in runs:
            each()

    return run


def _nothing() -> None:
    """A fence does nothing but wait."""
