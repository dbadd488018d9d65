"""Tabulated costs of a step's slots: what the integer program of ``policies.ilp`` knows.

Times are those of one layer, the one with most weights to stream. What readers get wrong: where the
first tokens of a batch are kept as layer inputs, recomputing more of the tail takes away loads of
KV first, and projections only once all KV is recomputed.
"""

from __future__ import annotations

from typing import NamedTuple

from policies.drive import StepContext
from policies.homes import Homes, Source
from policies.plan.op import Attention, Kind, Lane, Op, Scope
from policies.slot_problem import SlotProblem
from policies.step_ops import MIN_SLICE_BYTES

_SHARES = 64  # of the context that may be recomputed alike by all batches
_MOVES = {
    Source.KV: (Kind.READ_KV, Kind.LOAD_KV),
    Source.INPUT: (Kind.READ_ACT, Kind.LOAD_ACT),
}
_SCOPE = {Source.KV: Scope.LAYER, Source.INPUT: Scope.INPUT}


class _SlotTimes(NamedTuple):
    """Seconds of one batch in one layer, by resource."""

    compute_s: float
    h2d_s: float
    disk_s: float


class StepTables:
    """Costs of a step of context ``context`` whose first ``heads[b]`` tokens lie as inputs."""

    def __init__(
        self,
        ctx: StepContext,
        context: tuple[int, ...],
        heads: tuple[int, ...],
        *,
        attention: Attention,
        n_slices: int | None,
        serial_links: bool,
    ) -> None:
        self.ctx, self.context, self.heads = ctx, context, heads
        self.attention, self.serial_links = attention, serial_links
        self.layer = ctx.belief.heaviest_layer()
        self.n_slices = n_slices_of(ctx, n_slices)
        self._known: dict[object, _SlotTimes] = {}

    def sliced(self, candidates: tuple[tuple[int, ...], ...]) -> SlotProblem:
        """Pieces of the layer's weights are free to move in any slot."""
        return self._problem(candidates, self.n_slices)

    def unsliced(self, candidates: tuple[tuple[int, ...], ...]) -> SlotProblem:
        """The whole layer moves in batch 0's slot, beside the KV of the batch after it."""
        return self._problem(candidates, 0)

    def _problem(self, candidates: tuple[tuple[int, ...], ...], n_slices: int) -> SlotProblem:
        n = len(self.context)
        slots = [[self._slot(b, c) for c in candidates[b]] for b in range(n)]
        h2d = [[slot.h2d_s for slot in row] for row in slots]
        disk = [[slot.disk_s for slot in row] for row in slots]
        if not n_slices:
            after = 1 % n
            h2d[after] = [t + self._weight_s(Kind.LOAD_WEIGHT, 1) for t in h2d[after]]
            disk[after] = [t + self._weight_s(Kind.READ_WEIGHT, 1) for t in disk[after]]
        return SlotProblem(
            candidates=candidates,
            compute_s=tuple(tuple(slot.compute_s for slot in row) for row in slots),
            kv_h2d_s=tuple(map(tuple, h2d)),
            kv_disk_s=tuple(map(tuple, disk)),
            slice_h2d_s=self._weight_s(Kind.LOAD_WEIGHT, n_slices) if n_slices else 0.0,
            slice_disk_s=self._weight_s(Kind.READ_WEIGHT, n_slices) if n_slices else 0.0,
            n_slices=n_slices,
            serial_links=self.serial_links,
        )

    def bound_s(self, n_recompute: tuple[int, ...]) -> float:
        """Seconds of the busiest resource in one layer: what no schedule can beat."""
        slots = [self._slot(b, n) for b, n in enumerate(n_recompute)]
        return max(
            sum(slot.compute_s for slot in slots),
            sum(slot.h2d_s for slot in slots) + self._weight_s(Kind.LOAD_WEIGHT, 1),
            sum(slot.disk_s for slot in slots) + self._weight_s(Kind.READ_WEIGHT, 1),
        )

    def even_tails(self) -> tuple[int, ...]:
        """The same share of every batch's context, recomputed, that has the least bound.

        Compute grows with the tails and transfers fall, so the bound has one valley.
        """

        def tails(share: int) -> tuple[int, ...]:
            return tuple(n * share // _SHARES for n in self.context)

        low, high = 0, _SHARES
        while high - low > 2:
            left, right = low + (high - low) // 3, high - (high - low) // 3
            if self.bound_s(tails(left)) <= self.bound_s(tails(right)):
                high = right
            else:
                low = left
        return tails(min(range(low, high + 1), key=lambda share: self.bound_s(tails(share))))

    def _slot(self, b: int, n_recompute: int) -> _SlotTimes:
        """Batch b's seconds; batches that are alike are priced once."""
        key = (self.ctx.block.batches[b], self.context[b], self.heads[b], n_recompute)
        if key not in self._known:
            compute_s = self.compute_s(b, n_recompute)
            self._known[key] = _SlotTimes(compute_s, *self._moved_s(b, n_recompute))
        return self._known[key]

    def compute_s(self, b: int, n_recompute: int) -> float:
        """Seconds of batch b's forward."""
        batch, context = self.ctx.block.batches[b], self.context[b]
        return self.ctx.belief.seconds(
            Op(
                Kind.FORWARD,
                self.ctx.block.index,
                self.ctx.step,
                self.layer,
                n_seqs=batch.n_seqs,
                n_new=batch.prompt_len if self.ctx.is_prefill else 1,
                n_recompute=n_recompute,
                n_ctx=context,
                n_project=min(self.heads[b], context - n_recompute),
                attention=self.attention,
            )
        )

    def _moved_s(self, b: int, n_recompute: int) -> tuple[float, float]:
        """Seconds of H2D and of disk for what batch b takes from homes."""
        load = self.context[b] - n_recompute
        h2d_s = disk_s = 0.0
        for held in Homes.headed(self.heads[b], load).ranges(0, load):
            for kind in _MOVES[held.source]:
                op = Op(
                    kind,
                    self.ctx.block.index,
                    self.ctx.step,
                    self.layer,
                    scope=_SCOPE[held.source],
                    n_seqs=self.ctx.block.batches[b].n_seqs,
                    start=held.start,
                    stop=held.stop,
                )
                seconds = self.ctx.belief.seconds(op)
                if op.lane is Lane.DISK:
                    disk_s += seconds
                else:
                    h2d_s += seconds
        return h2d_s, disk_s

    def _weight_s(self, kind: Kind, n_parts: int) -> float:
        g, s = self.ctx.block.index, self.ctx.step
        return self.ctx.belief.seconds(Op(kind, g, s, self.layer, n_parts=n_parts))


def n_slices_of(ctx: StepContext, wanted: int | None) -> int:
    """Pieces of a layer's weights: ``wanted``, or four a batch, none too small; 0 if none move."""
    layer = ctx.belief.heaviest_layer()
    size = ctx.placement.streamed_bytes(ctx.model, layer, Scope.LAYER)
    return max(1, min(wanted or 4 * ctx.n_batches, size // MIN_SLICE_BYTES)) if size else 0
