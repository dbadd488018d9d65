"""Memory and time of ``mixed`` without the search for its homes, which takes long.

Which share of the tokens to keep as layer inputs is found by trying plans; what a search or a batch
size asks of thousands of jobs is only whether any share fits, and a time that no share beats. What
readers get wrong: this bound is looser than ``bound.run_bound`` with the share known. It grants the
best mix of sources to every step, each at its lowest cost per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from policies.cost.bound import RunBound, alike
from policies.cost.breakeven import phase_cost
from policies.cost.model import CostModel
from policies.drive import Policy
from policies.head import heads_of
from policies.mixed import Mixed
from policies.placement import Placement, home_bytes
from policies.plan.memory import place
from policies.plan.op import Attention, Kind, Op, Scope
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Batch, Block

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_INTERVALS = 16  # of the share
_PITCH = 32  # of the weights that link, disk and GPU get, each a multiple of one in so many

Floats = NDArray[np.float64]


def possible_placements(
    policy: Policy, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
) -> Iterator[Placement]:
    """Placements that tell what memory a policy can do with: its own, for ``mixed`` a few shares.

    Bytes are linear in the share, so the least of each tier is at one of the ends.
    """
    if not isinstance(policy, Mixed):
        yield policy.place(model, hardware, blocks)
        return
    for share in _SHARES:
        heads = tuple(heads_of(block, share) for block in blocks)
        yield place(model, hardware, blocks, policy.buffers, mode=policy.placement, inputs=heads)


def mixed_bound(
    policy: Mixed, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
) -> RunBound:
    """Least seconds of a run over ``blocks``, whatever the share.

    Without inputs least lies on the GPU besides weights, so most weights do, and least of them is
    on disk. Phases are disjoint, so the makespan is bounded by their sum.
    """
    placement = place(model, hardware, blocks, policy.buffers, mode=policy.placement)
    costs = CostModel(model, hardware, placement)
    prefill_s = decode_s = tpot_weight = 0.0
    tpot_seqs = 0
    for block, times in alike(placement, blocks):
        steps = block.max_new - 1
        prefill_s += times * phase_cost(costs, block, 0, Attention.FUSED, stores=False).bound_s
        if steps:
            # As in ``run_bound``: two layers' inputs may arrive while prefill still runs.
            early = max(0.0, 1.0 - 2.0 / (steps * model.n_layers))
            block_s = early * steps * _step_s(policy, costs, block)
            decode_s += times * block_s
            tpot_weight += times * block.n_seqs * block_s / steps
            tpot_seqs += times * block.n_seqs
    tpot_s = tpot_weight / tpot_seqs if tpot_seqs else None
    return RunBound(prefill_s, decode_s, prefill_s + decode_s, tpot_s)


def _step_s(policy: Mixed, costs: CostModel, block: Block) -> float:
    """Least seconds of the middle decode step, over all shares of layer inputs.

    For weights ``x`` of link, disk and GPU that sum to 1 the longest of the three takes at least
    ``sum_i x_i seconds_i``, and that is least if every token comes from its cheapest source: a
    bound for any ``x`` (duality of the linear program), and the best of many. With a share between
    ``low`` and ``high`` the first ``low`` of a batch's tokens are not loaded as KV, and those from
    ``high`` on are not projected.
    """
    step = block.max_new // 2
    fixed = phase_cost(costs, block, step, Attention.FUSED, stores=False)
    base = np.array([fixed.weights_s, _weights_from_disk_s(costs, block, step), fixed.compute_s])
    weights = _weights()
    batches = [
        (times, _sources(costs, block, batch, step))
        for batch, times in Counter(block.batches).items()
    ]
    found = []
    edges = [i / _INTERVALS for i in range(_INTERVALS + 1)]
    on_disk = [_share_on_disk(costs, block, share) for share in edges]
    for i, (low, high) in enumerate(pairwise(edges)):
        total = weights @ base
        for times, seconds in batches:
            links = seconds * (1.0, min(on_disk[i : i + 2]), 1.0)
            kv, project, recompute = (weights @ links.T).T
            again = recompute if policy.recompute else np.full_like(recompute, np.inf)
            head, tail = np.minimum(project, again), np.minimum(kv, again)
            middle = np.minimum(head, tail)
            total = total + times * (low * head + (high - low) * middle + (1 - high) * tail)
        found.append(float(total.max()))
    return min(found)


def _weights() -> Floats:
    """Weights of (link, disk, GPU): the points of a grid over those that sum to 1."""
    points = [(i, j, _PITCH - i - j) for i in range(_PITCH + 1) for j in range(_PITCH + 1 - i)]
    return np.array(points, dtype=np.float64) / _PITCH


def _weights_from_disk_s(costs: CostModel, block: Block, step: int) -> float:
    kinds = costs.layer_kinds.items()
    return sum(n * costs.seconds(Op(Kind.READ_WEIGHT, block.index, step, i)) for i, n in kinds)


def _share_on_disk(costs: CostModel, block: Block, share: float) -> float:
    """Share of the homes on disk if no staging were needed, with a share of layer inputs."""
    placement = costs.placement
    if placement.kv[block.index].disk == 0:
        return 0.0
    room = costs.hardware.usable_bytes("host") - placement.total_weight_bytes(costs.model, "host")
    need = sum(home_bytes(costs.model, block, heads_of(block, share)))
    return max(0.0, 1.0 - room / need)


def _sources(costs: CostModel, block: Block, batch: Batch, step: int) -> Floats:
    """Seconds of (link, disk, GPU) if all of a batch's tokens are loaded, projected, recomputed.

    All homes on disk; links without their latency; compute at the lowest cost per token of any
    number of tokens.
    """
    n_ctx, hardware = batch.prompt_len + step - 1, costs.hardware
    found = np.zeros((3, 3))
    moves = ((Kind.LOAD_KV, Scope.LAYER), (Kind.LOAD_ACT, Scope.INPUT))
    for i, (kind, scope) in enumerate(moves):
        op = Op(kind, block.index, step, scope=scope, n_seqs=batch.n_seqs, stop=n_ctx)
        moved = costs.model.n_layers * costs.nbytes(op)
        found[i, :2] = moved / hardware.h2d.bytes_per_s, moved / hardware.disk_read.bytes_per_s
    forward = Op(Kind.FORWARD, block.index, step, n_seqs=batch.n_seqs, n_new=1, n_ctx=n_ctx)
    for layer, n in costs.layer_kinds.items():
        op = replace(forward, layer=layer)
        plain_s = costs.seconds(op)

        def per_token_s(again: Op, tokens: int, plain_s: float = plain_s) -> float:
            return (costs.seconds(again) - plain_s) / tokens

        some = _up_to(n_ctx)
        project_s = min((per_token_s(replace(op, n_project=k), k) for k in some), default=0.0)
        recompute_s = min((per_token_s(replace(op, n_recompute=k), k) for k in some), default=0.0)
        found[1:, 2] += n * n_ctx * np.maximum((project_s, recompute_s), 0.0)
    return found


def _up_to(n: int) -> list[int]:
    """Powers of two below n, and n."""
    return [2**i for i in range(n.bit_length()) if 2**i < n] + [n] if n else []
