"""KVPR's split: how many tokens at the head are projected from layer inputs, the rest loaded.

arXiv 2411.17089 (ACL Findings 2025). Two schedules, and what readers get wrong is that they are
different programs: with the weights resident (row by row) the inputs come first and are projected
while the *rest of the KV* arrives, so their load is never hidden; with the weights streamed (column
by column) batches follow each other and projection hides behind *everything* on the link. Both are
never faster than ``policies.cost.three_sources``, which has the same link and may recompute too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["row", "column"]


@dataclass(frozen=True, slots=True)
class KvprSplit:
    """Head of ``n_project`` tokens, seconds of a layer with it and with all KV loaded."""

    n_project: int
    step_s: float
    load_all_s: float


def kvpr_step_s(
    n_project: int,
    n_ctx: int,
    load_kv_s: float,
    load_input_s: float,
    project_s: float,
    weights_s: float = 0.0,
    schedule: Schedule = "row",
) -> float:
    """Seconds of one layer when the first ``n_project`` of ``n_ctx`` tokens are projected.

    Times are of one token of all sequences. With l projected tokens, ``row``:
    ``l input + max(l project, (n_ctx - l) kv)``, weights resident; ``column``:
    ``max(l project, weights + l input + (n_ctx - l) kv)``.
    """
    load = (n_ctx - n_project) * load_kv_s
    inputs, projection = n_project * load_input_s, n_project * project_s
    if schedule == "row":
        return inputs + max(projection, load)
    return max(projection, weights_s + inputs + load)


def kvpr_split(
    n_ctx: int,
    load_kv_s: float,
    load_input_s: float,
    project_s: float,
    weights_s: float = 0.0,
    schedule: Schedule = "row",
) -> KvprSplit:
    """The whole number of projected tokens of least time, the smallest among equals.

    Nothing is projected where an input takes as long to load as KV. Otherwise the time falls up to

        row      l = n_ctx kv / (project + kv)
        column   l = (weights + n_ctx kv) / (project + kv - input), at most n_ctx

    and grows beyond. With ``input = 2 h / v_com`` bytes, KV twice that and ``4 h^2`` FLOPs a token
    ``row`` is the published ``s p v_gpu / (2 h v_com + p v_gpu)``. Seconds are of one token of all
    sequences in one layer; ``weights_s`` are the layer's weights on the link (``column`` only).
    """
    if schedule not in ("row", "column"):
        raise ValueError(f"schedule: {schedule!r} is none of 'row', 'column'")
    if n_ctx < 0:
        raise ValueError(f"n_ctx: {n_ctx} must be >= 0")
    times = {"load_kv_s": load_kv_s, "load_input_s": load_input_s, "project_s": project_s,
             "weights_s": weights_s}  # fmt: skip
    for name, value in times.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}: {value} must be a finite number >= 0")
    if schedule == "row" and weights_s:
        raise ValueError(f"weights_s: {weights_s} must be 0 in schedule row: weights are resident")

    def step_s(n: int) -> float:
        return kvpr_step_s(n, n_ctx, **times, schedule=schedule)

    tried = {0}
    if load_input_s < load_kv_s:
        saved = load_input_s if schedule == "column" else 0.0
        balance = (weights_s + n_ctx * load_kv_s) / (project_s + load_kv_s - saved)
        low = math.floor(min(n_ctx, balance))
        tried |= {low, min(n_ctx, low + 1)}
    best = min(tried, key=lambda n: (step_s(n), n))
    return KvprSplit(best, step_s(best), step_s(0))
