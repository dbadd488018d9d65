"""Which batches of a block to attend on the CPU: where all lanes together are busy the least.

A layer takes as long as its busiest lane, over all batches: the link (weights, KV of GPU batches,
outputs of CPU batches), its other direction, the disk, the GPU and the CPU; and no less than one
CPU batch needs for its way around (project, queries out, attend, output back, finish), because the
next layer of that batch begins where this one ends. What readers get wrong: the CPU pays even where
it is slower than the link. It reads KV while the link is busy with weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from policies.drive import StepContext
from policies.plan.op import Attention, Kind, Op, Scope

Floats = npt.NDArray[np.float64]

_LANES = 6  # H2D, D2H, disk, GPU, CPU; and the way around of one CPU batch, of which the most count


@dataclass(frozen=True, slots=True)
class Split:
    """``on_cpu`` as in ``Decision``; ``cpu_bound``: whether the CPU is the busiest lane."""

    on_cpu: tuple[int, ...]
    step_s: float
    cpu_bound: bool


class _LayerTimes(NamedTuple):
    """Seconds per lane of a layer's weights, and of each batch on the GPU and on the CPU."""

    weights: Floats  # [_LANES]
    gpu: Floats  # [n_batches, _LANES]
    cpu: Floats


def best_split(ctx: StepContext, attention: Attention, n_cpu: int | None = None) -> Split:
    """The split with the shortest predicted step; ``n_cpu`` fixes how many batches the CPU gets.

    Tried are all numbers of batches, those with most cached tokens first, and last; of equal ones
    the fewest. ``step_s`` leaves out the LM head.
    """
    tokens = [b.n_seqs * n for b, n in zip(ctx.block.batches, ctx.n_ctx(), strict=True)]
    down = sorted(range(ctx.n_batches), key=lambda b: -tokens[b])
    up = sorted(range(ctx.n_batches), key=lambda b: tokens[b])
    kinds = ctx.belief.layer_kinds.items()
    costs = [(n, _layer_s(ctx, layer, attention)) for layer, n in kinds]
    splits = [
        _of_order(order, costs, n_cpu) for order in ((down, up) if len(set(tokens)) > 1 else (up,))
    ]
    return min(splits, key=lambda split: split.step_s)


def _of_order(order: list[int], costs: list[tuple[int, _LayerTimes]], n_cpu: int | None) -> Split:
    """The best split whose CPU batches come first in ``order``."""
    busy = [(n, _busy(t.weights, t.gpu[order], t.cpu[order])) for n, t in costs]
    step_s: Floats = sum((n * lanes.max(axis=1) for n, lanes in busy), np.zeros(len(order) + 1))
    n = int(step_s.argmin()) if n_cpu is None else n_cpu
    total: Floats = sum((times * lanes[n] for times, lanes in busy), np.zeros(_LANES))
    there = set(order[:n])
    on_cpu = tuple(int(b in there) for b in range(len(order)))
    return Split(on_cpu, float(step_s[n]), bool(total[4:].max() >= total[:4].max()))


def _busy(weights: Floats, gpu: Floats, cpu: Floats) -> Floats:
    """Seconds ``[n + 1, _LANES]`` with the first 0, 1, ..., n batches on the CPU."""
    none = np.zeros((1, _LANES))
    there = np.concatenate((none, cpu.cumsum(axis=0)))
    there[1:, 5] = np.maximum.accumulate(cpu[:, 5])
    here = np.concatenate((none, gpu[::-1].cumsum(axis=0)))[::-1]
    busy: Floats = weights + there + here
    return busy


def _layer_s(ctx: StepContext, layer: int, attention: Attention) -> _LayerTimes:
    seconds = ctx.belief.seconds
    base = Op(Kind.FORWARD, ctx.block.index, ctx.step, layer, n_new=1)
    weights = np.zeros(_LANES)
    weights[0] = seconds(replace(base, kind=Kind.LOAD_WEIGHT))
    weights[2] = seconds(replace(base, kind=Kind.READ_WEIGHT))
    gpu, cpu = np.zeros((ctx.n_batches, _LANES)), np.zeros((ctx.n_batches, _LANES))
    for b, (batch, n_ctx) in enumerate(zip(ctx.block.batches, ctx.n_ctx(), strict=True)):
        op = replace(base, n_seqs=batch.n_seqs, n_ctx=n_ctx, attention=attention)
        kv, new = replace(op, stop=n_ctx), replace(op, stop=1)
        store_s = seconds(replace(new, kind=Kind.STORE_KV))
        read_s = seconds(replace(kv, kind=Kind.READ_KV))
        write_s = seconds(replace(new, kind=Kind.WRITE_KV))
        queries_s = seconds(replace(new, kind=Kind.STORE_ACT, scope=Scope.QKV))
        output_s = seconds(replace(new, kind=Kind.LOAD_ACT, scope=Scope.OUTPUT))
        attend_s = seconds(replace(kv, kind=Kind.CPU_ATTEND))
        parts = (Scope.QKV, Scope.OUTPUT, Scope.MLP)
        forward_s = sum(seconds(replace(op, scope=scope)) for scope in parts)
        gpu[b] = (seconds(replace(kv, kind=Kind.LOAD_KV)), store_s, read_s + write_s,
                  seconds(op), 0.0, 0.0)  # fmt: skip
        around_s = attend_s + output_s + queries_s + store_s + forward_s
        cpu[b] = (output_s, store_s + queries_s, read_s + write_s, forward_s, attend_s, around_s)
    return _LayerTimes(weights, gpu, cpu)
