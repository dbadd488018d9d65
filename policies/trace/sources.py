"""Where the cached tokens of a run's decode steps came from: means per batch and step, by source.

Loaded KV, layer inputs projected, tokens recomputed, KV attended on the CPU and KV that stays on
the GPU add up to the context. What readers get wrong: a decision alone does not say what is loaded.
That depends on what earlier steps stored, so a block's decisions are gone through in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from policies.drive import Decision
from policies.homes import Homes, Source
from policies.placement import Placement
from policies.spec.workload import Batch, Block


class Run(NamedTuple):
    """Steps ``[first, stop)`` of a block that decide the same; a block's runs are in order."""

    block: int
    first: int
    stop: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class Sources:
    """Cached tokens of a sequence, a mean over batches and decode steps.

    ``n_recompute`` counts front and tail. KV of which the placement has a share on the GPU counts
    as loaded and as resident in that proportion.
    """

    n_load: float
    n_project: float
    n_recompute: float
    n_cpu: float
    n_resident: float


def source_columns(sources: Sources | None) -> dict[str, float | None]:
    """Columns of a record, empty where nothing is decoded."""
    return {f"{name}_mean": getattr(sources, name, None) for name in Sources.__slots__}


def mean_sources(
    blocks: Sequence[Block], placement: Placement, runs: Iterable[Run], cpu: bool = False
) -> Sources | None:
    """Means over the decode steps of ``runs``; None without any.

    ``cpu``: all KV is attended on the CPU, whatever the decisions say. O(runs x batches): homes
    only grow, so those at the end of a run tell what every step of it found.
    """
    totals = [0.0] * len(Sources.__slots__)
    count = 0
    homes: list[Homes] = []
    at = -1
    for run in runs:
        block = blocks[run.block]
        if run.block != at:
            at, homes = run.block, [Homes()] * len(block.batches)
        first = max(run.first, 1)  # step 0 is prefill
        if first >= run.stop:
            continue
        gpu = placement.kv[run.block].gpu
        for b, batch in enumerate(block.batches):
            homes[b] = _stored(homes[b], batch, run.decision, b, first, run.stop)
            kv, inputs, again = _found(homes[b], batch, run.decision, b, first, run.stop)
            there = cpu or bool(run.decision.on_cpu[b])
            away = 0.0 if there else kv * (1.0 - gpu)
            split = (away, inputs, again, kv if there else 0.0, 0.0 if there else kv * gpu)
            totals = [held + more for held, more in zip(totals, split, strict=True)]
        count += (run.stop - first) * len(block.batches)
    return Sources(*(total / count for total in totals)) if count else None


def inputs_share(blocks: Sequence[Block], placement: Placement) -> float:
    """Share of the tokens with a booked home that are kept as layer inputs, over all blocks."""
    kept = booked = 0
    for block in blocks:
        for batch, head in zip(block.batches, placement.heads(block), strict=True):
            kept += batch.n_seqs * head
            booked += batch.n_seqs * (batch.prompt_len + block.max_new - 1)
    return kept / booked


def _stored(homes: Homes, batch: Batch, decision: Decision, b: int, first: int, stop: int) -> Homes:
    """Homes before step ``stop - 1``. Steps after the first of a run store a token at most."""
    reach = batch.prompt_len - 1 - decision.n_recompute[b]
    homes = homes.append(reach + first, decision.n_inputs[b])
    later = reach + stop - 1
    more = later - homes.n_stored
    return homes.append(later, more if decision.n_inputs[b] and more > 0 else 0)


def _found(
    homes: Homes, batch: Batch, decision: Decision, b: int, first: int, stop: int
) -> tuple[int, int, int]:
    """Tokens from homes of KV and of inputs, and recomputed, summed over a run's steps."""
    front, tail = decision.n_front[b], decision.n_recompute[b]
    reach = batch.prompt_len - 1 - tail
    sums = {Source.KV: 0, Source.INPUT: 0}
    for held in homes.ranges(front, reach + stop - 1):
        # Step s finds tokens below reach + s: of a range min(reach + s - start, size).
        size = held.stop - held.start
        sums[held.source] += _sum_up_to(reach + stop - 1 - held.start, size)
        sums[held.source] -= _sum_up_to(reach + first - 1 - held.start, size)
    return sums[Source.KV], sums[Source.INPUT], (stop - first) * (front + tail)


def _sum_up_to(n: int, size: int) -> int:
    """Sum of ``min(x, size)`` over x = 1..n; 0 for n <= 0."""
    if n <= 0:
        return 0
    low = min(n, size)
    return low * (low + 1) // 2 + (n - low) * size
