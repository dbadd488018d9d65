"""A lower bound on the time of a run, from its placement alone: what pruning a search rests on.

Per block and phase, the seconds of the busiest resource (``breakeven.phase_cost``) with perfect
overlap, or between fences (``cost.fenced``) where the policy has them; a policy that may recompute
is granted the best tail (Cake the best front), and that it never stores; one that attends on both
sides, the best share of the CPU. What readers get wrong: a phase is not alone. While prefill ends,
the weights of the first decode layers may be loading already, so decode is bounded by a little less
than its own work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from policies.accelerate import Accelerate
from policies.attended import attended_on_cpu
from policies.cake import Cake
from policies.cost.breakeven import PhaseCost, phase_cost
from policies.cost.fenced import fenced_step_s
from policies.cost.model import CostModel
from policies.cpu_attention import CpuAttention
from policies.drive import Policy
from policies.flexgen import FlexGen
from policies.placement import Placement
from policies.plan.op import Attention
from policies.spec.workload import Block
from policies.zero_inference import ZeroInference

_STRETCHES = 8  # of decode steps, where layer inputs are loaded


@dataclass(frozen=True, slots=True)
class RunBound:
    """Least seconds of a run over all its blocks.

    ``tpot_s`` bounds the mean over sequences of decode time per decode step, None without decode.
    """

    prefill_s: float
    decode_s: float
    makespan_s: float
    tpot_s: float | None


def may_recompute(policy: Policy) -> bool:
    """Whether a policy may recompute cached tokens; one that is not known may."""
    if isinstance(policy, FlexGen | Accelerate | ZeroInference | CpuAttention):
        return False
    return bool(getattr(policy, "distributor", True))


def run_bound(policy: Policy, costs: CostModel, blocks: Sequence[Block]) -> RunBound:
    """The bound of ``blocks``, as ``policy.blocks`` gives them, under ``costs.placement``."""
    prefill_s = decode_s = makespan_s = tpot_weight = 0.0
    tpot_seqs = 0
    attention, recompute = policy.buffers.attention, may_recompute(policy)
    for block, times in alike(costs.placement, blocks):
        steps = block.max_new - 1
        stores = not recompute and steps > 0
        before = phase_cost(costs, block, 0, attention, stores=stores)
        lanes = _lanes(before)
        fenced = _fenced(policy, costs, block)
        first_s, later_s = fenced if fenced else (0.0, 0.0)
        prefill_s += times * max(before.bound_s, first_s)
        if steps:
            decode = _decode(policy, costs, block, recompute)
            # Two slots: at most two layers' inputs arrive while prefill still runs.
            early = 2.0 / (steps * costs.model.n_layers)
            block_s = max(max(decode), later_s) * max(0.0, 1.0 - early)
            decode_s += times * block_s
            tpot_weight += times * block.n_seqs * block_s / steps
            tpot_seqs += times * block.n_seqs
            lanes = tuple(a + b for a, b in zip(lanes, decode, strict=True))
        makespan_s += times * max(*lanes, first_s + later_s)
    return RunBound(prefill_s, decode_s, makespan_s, tpot_weight / tpot_seqs if tpot_seqs else None)


def alike(placement: Placement, blocks: Sequence[Block]) -> list[tuple[Block, int]]:
    """The first block of every shape, and how many are of it."""
    shapes = [(block.batches, block.max_new, placement.kv[block.index]) for block in blocks]
    counts = Counter(shapes)
    first = dict(zip(reversed(shapes), reversed(blocks), strict=True))
    return [(first[shape], times) for shape, times in counts.items()]


def _fenced(policy: Policy, costs: CostModel, block: Block) -> tuple[float, float] | None:
    """Least seconds of prefill and of all decode steps between fences; None without fences."""
    if not isinstance(policy, FlexGen) or not policy.fence:
        return None
    steps, middle = block.max_new - 1, block.max_new // 2
    prefill_s = fenced_step_s(costs, block, 0, policy.schedule, stores=steps > 0)
    if not steps:
        return prefill_s, 0.0
    one_s = fenced_step_s(costs, block, middle, policy.schedule, stores=False)
    return prefill_s, steps * one_s


def _lanes(cost: PhaseCost) -> tuple[float, ...]:
    return cost.h2d_s, cost.store_s, cost.disk_s, cost.compute_s, cost.cpu_s


def _decode(policy: Policy, costs: CostModel, block: Block, recompute: bool) -> tuple[float, ...]:
    """Seconds per lane of all decode steps, as the policy attends and recomputes in them."""
    attention = policy.buffers.attention
    if isinstance(policy, CpuAttention):
        return _split_lanes(costs, block, attention)
    on_cpu = attended_on_cpu(policy, costs, block)
    front = isinstance(policy, Cake)
    return _decode_lanes(costs, block, attention, on_cpu, recompute and not any(on_cpu), front)


def _split_lanes(costs: CostModel, block: Block, attention: Attention) -> tuple[float, ...]:
    """Seconds per lane where every batch, or a part of it, attends on the GPU or on the CPU.

    Link and CPU share the KV, so what is bounded is the longer of both, and it stands for the CPU:
    ``max(link, cpu) >= x link + (1 - x) cpu`` for any x in 0..1, in which each batch takes the
    lesser side. A batch computes at least what the lesser way takes in the first step.
    """
    steps, middle = block.max_new - 1, block.max_new // 2
    whole = phase_cost(costs, block, middle, attention, stores=False)
    store_s = phase_cost(costs, block, middle, attention).store_s
    sides: list[tuple[float, float]] = []  # seconds of the link and of the CPU
    compute_s = 0.0
    for batch, times in Counter(block.batches).items():
        one = replace(block, batches=(batch,))
        kv_s = phase_cost(costs, one, middle, attention).kv_s
        cpu_s = phase_cost(costs, one, middle, attention, on_cpu=(1,)).cpu_s
        sides.append((times * kv_s, times * cpu_s))
        ways = (phase_cost(costs, one, 1, attention, on_cpu=there).compute_s
                for there in ((0,), (1,)))  # fmt: skip
        compute_s += times * min(ways)
    shares = {1.0} | {cpu_s / (kv_s + cpu_s) for kv_s, cpu_s in sides if kv_s + cpu_s > 0}
    longer_s = max(
        x * whole.weights_s + sum(min(x * kv_s, (1 - x) * cpu_s) for kv_s, cpu_s in sides)
        for x in shares
    )
    each = (whole.weights_s, 0.0, whole.disk_s, compute_s, longer_s)
    lanes = [steps * seconds for seconds in each]
    lanes[1] = (steps - 1) * store_s  # the last step stores nothing
    return tuple(lanes)


def _decode_lanes(
    costs: CostModel,
    block: Block,
    attention: Attention,
    on_cpu: tuple[int, ...],
    recompute: bool,
    front: bool,
) -> tuple[float, ...]:
    """Seconds per lane of all decode steps.

    Loads of KV and compute are linear in the context or convex, so each step counts as the middle
    one. Loads of layer inputs end at the head, which is concave: there a few stretches of steps
    each count as their first.
    """
    steps, middle = block.max_new - 1, block.max_new // 2
    stretches = [(middle, steps)]
    if any(costs.placement.heads(block)):
        marks = sorted({1 + i * steps // _STRETCHES for i in range(_STRETCHES)} | {block.max_new})
        stretches = [(first, end - first) for first, end in pairwise(marks)]
    lanes = [0.0] * 5
    for step, n in stretches:
        if recompute:
            cost, store_s = _best_tail(costs, block, step, attention, front), 0.0
        else:
            cost = phase_cost(costs, block, step, attention, stores=False, on_cpu=on_cpu)
            store_s = phase_cost(costs, block, step, attention, on_cpu=on_cpu).store_s
        lanes = [held + n * more for held, more in zip(lanes, _lanes(cost), strict=True)]
        lanes[1] += n * store_s * (steps - 1) / steps  # the last step stores nothing
    return tuple(lanes)


def _best_tail(
    costs: CostModel, block: Block, step: int, attention: Attention, front: bool
) -> PhaseCost:
    """The step with the tail, or the front, that balances transfers and compute.

    Transfers fall and compute grows with it, so the best is where they cross.
    """

    def at(n: int) -> PhaseCost:
        return phase_cost(costs, block, step, attention, n, stores=False, front=front)

    low, high = 0, max(b.prompt_len for b in block.batches) + step - 1
    least, most = at(low), at(high)
    while high - low > 1:
        middle = (low + high) // 2
        cost = at(middle)
        if cost.compute_s < max(cost.h2d_s, cost.disk_s):
            low, least = middle, cost
        else:
            high, most = middle, cost
    return min(least, most, key=lambda cost: cost.bound_s)
