"""Break-even: what bounds an offloaded job before any schedule is chosen, and what could help.

Seconds per resource of one prefill and of one decode step in the middle of the generation, each
resource taken alone. Their maximum is what perfect overlap can reach, their sum what no overlap
costs. What readers get wrong: this is about the *problem* on this machine (pinned copies, whole
layers), not about a policy; a policy that copies from pageable memory is slower than either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from policies.cost.balance import n_recompute_closed_form
from policies.cost.flops import expert_elems
from policies.cost.kappa import kappa_of
from policies.cost.model import CostModel
from policies.placement import ON_GPU, Placement
from policies.plan.memory import Buffers, block_pools, run_pools
from policies.plan.op import Attention, Kind, Op, Scope, Tier
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block

WORTHWHILE_GAIN = 1.01  # below this a policy may as well load everything
_SCAN_POINTS = 33
_INPUT_MOVES = (Kind.LOAD_ACT, Kind.STORE_ACT, Kind.READ_ACT, Kind.WRITE_ACT)
_MAX_SEQS = 2**20


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """Seconds that each resource is busy for one step of the whole block.

    ``weights_s`` and ``kv_s`` share the H2D link; ``store_s`` is D2H; ``cpu_s`` is attention on the
    CPU, where the policy attends there.
    """

    weights_s: float
    kv_s: float
    store_s: float
    disk_s: float
    compute_s: float
    cpu_s: float = 0.0

    @property
    def h2d_s(self) -> float:
        """Busy time of the H2D link."""
        return self.weights_s + self.kv_s

    @property
    def bound_s(self) -> float:
        """Time of the busiest resource: no schedule is faster without recomputing."""
        return max(self.h2d_s, self.store_s, self.disk_s, self.compute_s, self.cpu_s)

    @property
    def bound(self) -> str:
        """What bounds it: ``weights``, ``kv``, ``disk``, ``compute`` or ``cpu``."""
        if self.bound_s == self.compute_s:
            return "compute"
        if self.bound_s == self.h2d_s:
            return "weights" if self.weights_s >= self.kv_s else "kv"
        if self.bound_s == self.disk_s:
            return "disk"
        return "cpu" if self.bound_s == self.cpu_s else "kv"

    @property
    def overlap_gain(self) -> float:
        """Speed-up of perfect overlap over none: sum of all resources over their maximum."""
        total = self.h2d_s + self.store_s + self.disk_s + self.compute_s + self.cpu_s
        return total / self.bound_s


@dataclass(frozen=True, slots=True)
class BreakEven:
    """What bounds a block and what can be gained.

    ``decode`` is a step with ``n_ctx`` cached tokens in the longest batch, None where the block
    generates one token only. ``n_recompute`` tokens of every sequence (the tail) give
    ``recompute_gain``, the best ratio of bounds over all N_r; ``n_recompute_closed`` is the closed
    form, None outside its conditions. ``cpu_step_s`` is a decode step that reads weights and KV by
    the CPU and never the link, without its arithmetic (None: something lies on disk or on the GPU
    already); from ``offload_wins_seqs`` sequences on the link is faster (None: at no size).
    ``on_cpu_share`` of the cached tokens are attended on the CPU: their KV is not loaded, and
    recompute is not looked at. ``resident_bytes`` is what holding everything on the GPU takes.
    """

    n_seqs: int
    n_ctx: int
    prefill: PhaseCost
    decode: PhaseCost | None
    n_recompute: int
    recompute_gain: float
    n_recompute_closed: float | None
    cpu_step_s: float | None
    offload_wins_seqs: int | None
    resident_bytes: int
    gpu_usable_bytes: float
    on_cpu_share: float = 0.0

    @property
    def fits_on_gpu(self) -> bool:
        """Whether weights, KV and workspace of the block fit in GPU memory together."""
        return self.resident_bytes <= self.gpu_usable_bytes

    @property
    def cpu_wins(self) -> bool:
        """Whether the CPU reads weights and KV sooner than a decode step's bound."""
        if self.decode is None or self.cpu_step_s is None:
            return False
        return self.cpu_step_s < self.decode.bound_s

    @property
    def load_everything(self) -> bool:
        """Whether recomputing gains less than 1 %."""
        return self.recompute_gain < WORTHWHILE_GAIN


def break_even(
    model: ModelSpec,
    hardware: HardwareProfile,
    placement: Placement,
    block: Block,
    attention: Attention = Attention.FUSED,
    on_cpu: tuple[int, ...] = (),
) -> BreakEven:
    """Bounds of ``block`` under ``placement``; decode is priced at its middle step.

    ``on_cpu[b]`` is 1 where a decode step attends batch b on the CPU (none: nowhere): its KV is not
    loaded and nothing is recomputed. Times are uncontended sums of ``CostModel.seconds`` over all
    layers and batches.
    """
    costs = CostModel(model, hardware, placement)
    usable = hardware.usable_bytes("gpu")
    step = block.max_new // 2
    share = _share(block, step, on_cpu) if block.max_new > 1 else 0.0
    decode, best, gain = None, 0, 1.0
    if block.max_new > 1:
        decode = phase_cost(costs, block, step, attention, on_cpu=on_cpu)
        if not share:
            best, gain = _best_recompute(costs, block, step, attention)
    cpu_step_s, wins = _cpu(model, hardware, placement, block, decode, share)
    return BreakEven(
        n_seqs=block.n_seqs,
        n_ctx=max(_contexts(block, step)) if decode else 0,
        prefill=phase_cost(costs, block, 0, attention),
        decode=decode,
        n_recompute=best,
        recompute_gain=gain,
        n_recompute_closed=None if share else _closed_form(costs, block, step, decode),
        cpu_step_s=cpu_step_s,
        offload_wins_seqs=wins,
        resident_bytes=_resident_bytes(model, block, attention),
        gpu_usable_bytes=usable,
        on_cpu_share=share,
    )


def _contexts(block: Block, step: int) -> tuple[int, ...]:
    return tuple(b.prompt_len + step - 1 if step else 0 for b in block.batches)


def _share(block: Block, step: int, on_cpu: tuple[int, ...]) -> float:
    """Share of the cached tokens, over all sequences, that are attended on the CPU."""
    tokens = [b.n_seqs * n for b, n in zip(block.batches, _contexts(block, step), strict=True)]
    there = zip(tokens, on_cpu or (0,) * len(tokens), strict=True)
    return sum(n for n, cpu in there if cpu) / sum(tokens)


def phase_cost(
    costs: CostModel,
    block: Block,
    step: int,
    attention: Attention,
    n_recompute: int = 0,
    stores: bool = True,
    front: bool = False,
    on_cpu: tuple[int, ...] = (),
) -> PhaseCost:
    """Resource seconds of one step in which every batch recomputes up to ``n_recompute`` tokens.

    With ``stores`` false nothing leaves the GPU: so it is in a block's last step, and so it may be
    wherever the next step recomputes. The first tokens, as many as the placement says, lie as layer
    inputs. ``front``: the first tokens are recomputed, not the last. ``on_cpu[b]`` is 1 where batch
    b attends on the CPU in decode (none: nowhere), all where ``attention`` is ``cpu``, which
    prefills unfused; ``ValueError`` where it is not so.
    """
    n_layers = costs.model.n_layers
    # Layers of a kind cost the same, and so do batches of the same shape.
    kinds = costs.layer_kinds.items()
    n_batches = len(block.batches)
    there = on_cpu if step and on_cpu else (0,) * n_batches
    if step and attention is Attention.CPU and not all(there):
        raise ValueError(f"on_cpu: {there} must be 1 for every batch, attention is cpu")
    forward = Attention.UNFUSED if attention is Attention.CPU else attention

    def total(op: Op) -> float:
        return sum(n * costs.seconds(replace(op, layer=i)) for i, n in kinds)

    def move(kind: Kind, n_seqs: int = 0, stop: int = 0) -> float:
        scope = Scope.INPUT if kind in _INPUT_MOVES else Scope.LAYER
        return sum(
            n * costs.seconds(Op(kind, block.index, step, i, scope=scope, n_seqs=n_seqs, stop=stop))
            for i, n in kinds
        )

    weights_s, disk_s = move(Kind.LOAD_WEIGHT), move(Kind.READ_WEIGHT)
    kv_s = store_s = compute_s = cpu_s = 0.0
    heads = costs.placement.heads(block)
    alike = Counter(zip(block.batches, heads, there, strict=True))
    for (batch, head, cpu), times in alike.items():
        n_ctx = batch.prompt_len + step - 1 if step else 0
        again = min(n_recompute, n_ctx)
        n_new = 1 if step else batch.prompt_len
        n, load = batch.n_seqs, n_ctx - again
        inputs = min(head, load)
        out = n_new if stores else 0
        out_inputs = min(out, max(0, head - n_ctx))
        disk_s += times * (move(Kind.READ_KV, n, load - inputs) + move(Kind.READ_ACT, n, inputs))
        disk_s += times * move(Kind.WRITE_KV, n, out - out_inputs)
        disk_s += times * move(Kind.WRITE_ACT, n, out_inputs)
        store_s += times * move(Kind.STORE_KV, n, out - out_inputs)
        store_s += times * move(Kind.STORE_ACT, n, out_inputs)
        work = Op(Kind.FORWARD, block.index, step, n_seqs=n, n_new=n_new,
                  n_recompute=0 if front else again, n_front=again if front else 0,
                  n_project=inputs, n_ctx=n_ctx, attention=forward)  # fmt: skip
        if cpu:
            attend = replace(work, kind=Kind.CPU_ATTEND, stop=n_ctx, n_project=0)
            cpu_s += times * total(attend)
            for scope in (Scope.QKV, Scope.OUTPUT, Scope.MLP):
                compute_s += times * total(replace(work, scope=scope))
        else:
            kv_s += times * (move(Kind.LOAD_KV, n, load - inputs) + move(Kind.LOAD_ACT, n, inputs))
            compute_s += times * total(work)
        last = Op(Kind.FORWARD, block.index, step, n_layers, scope=Scope.HEAD, n_seqs=n, n_new=1)
        compute_s += times * costs.seconds(last)
    return PhaseCost(weights_s, kv_s, store_s, disk_s, compute_s, cpu_s)


def _best_recompute(
    costs: CostModel, block: Block, step: int, attention: Attention
) -> tuple[int, float]:
    """N_r with the smallest bound and its gain over N_r = 0; the fewest tokens among equals."""

    def bound_s(n: int) -> float:
        return phase_cost(costs, block, step, attention, n).bound_s

    low, high = 0, max(_contexts(block, step))
    seen = {0: bound_s(0)}
    while True:
        points = _spread(low, high)
        seen |= {n: bound_s(n) for n in points if n not in seen}
        best = min(seen, key=lambda n: (seen[n], n))
        if high - low < _SCAN_POINTS:
            return best, seen[0] / seen[best]
        pitch = (high - low) // (_SCAN_POINTS - 1) + 1
        low, high = max(low, best - pitch), min(high, best + pitch)


def _spread(low: int, high: int) -> list[int]:
    """At most ``_SCAN_POINTS`` whole numbers from ``low`` to ``high``, both included."""
    n = min(_SCAN_POINTS, high - low + 1)
    return sorted({low + round(i * (high - low) / max(1, n - 1)) for i in range(n)})


def _closed_form(
    costs: CostModel, block: Block, step: int, decode: PhaseCost | None
) -> float | None:
    """``policies.cost.balance`` where it holds: only KV moves, and bounds, all batches alike.

    C_eff is the last measured GEMM rate, F_pfl counts the layers without the LM head.
    """
    model, hardware, placement = costs.model, costs.hardware, costs.placement
    if decode is None or decode.bound != "kv":
        return None
    weights_move = placement.total_weight_bytes(model, "gpu") < model.layers_bytes()
    kv = placement.kv[block.index]
    if weights_move or kv.streamed < 1.0 or kv.disk > 0 or len(set(block.batches)) > 1:
        return None
    kappa = kappa_of(model, hardware.h2d.bytes_per_s, hardware.gemm.y[-1])
    return n_recompute_closed_form(_contexts(block, step)[0], 1, kappa.kappa_crit)


def _resident_bytes(model: ModelSpec, block: Block, attention: Attention) -> int:
    """GPU bytes that hold weights, KV, hidden states and workspace of one block."""
    everything = Placement(
        weights=((ON_GPU, ON_GPU),) * model.n_layers, kv=(ON_GPU,) * (block.index + 1)
    )
    buffers = Buffers(weight_slots=0, kv_in_slots=0, kv_out_slots=0, attention=attention)
    pools = run_pools(model, everything, buffers) + block_pools(model, everything, buffers, block)
    return sum(pool.nbytes for pool in pools if pool.tier is Tier.GPU)


# ---- the CPU as a rival --------------------------------------------------------------------------


def _cpu(
    model: ModelSpec,
    hardware: HardwareProfile,
    placement: Placement,
    block: Block,
    decode: PhaseCost | None,
    on_cpu_share: float,
) -> tuple[float | None, int | None]:
    """Seconds of a decode step on the CPU, and from how many sequences on the link is faster.

        n kv / cpu_attention_bytes_per_s + touched(n) / cpu_bytes_per_s >= link(n)

    link(n) loads the same weights (all experts) and, at the H2D rate, the KV but for
    ``on_cpu_share`` of it, which the CPU reads either way. Only where all weights and KV
    lie in host memory: otherwise neither side pays for everything.
    """
    kv = placement.kv[block.index]
    total = model.layers_bytes()
    if decode is None or kv.host < 1.0 or placement.total_weight_bytes(model, "host") < total:
        return None, None
    kv_bytes = model.kv_bytes_per_token * _mean_context(block)

    def cpu_s(n: int) -> float:
        weights = _touched_bytes(model, n) / hardware.cpu_bytes_per_s
        return weights + n * kv_bytes / hardware.cpu_attention_bytes_per_s

    def link_s(n: int) -> float:
        loaded = n * kv_bytes * (1.0 - on_cpu_share)
        return (total + loaded) / hardware.h2d.bytes_per_s

    return cpu_s(block.n_seqs), _first(lambda n: cpu_s(n) >= link_s(n))


def _mean_context(block: Block) -> float:
    """Cached tokens per sequence at the middle step, over all sequences."""
    contexts = _contexts(block, block.max_new // 2)
    tokens = sum(b.n_seqs * n for b, n in zip(block.batches, contexts, strict=True))
    return tokens / block.n_seqs


def _touched_bytes(model: ModelSpec, n_seqs: int) -> float:
    """Bytes of the layers' weights that one decode step of ``n_seqs`` sequences reads."""
    idle = sum(
        (model.n_experts - model.experts_touched(i, n_seqs)) * expert_elems(model)
        for i in range(model.n_layers)
        if model.is_moe(i)
    )
    held = model.layers_bytes()
    return held - idle * model.weight_bytes_per_elem


def _first(holds: Callable[[int], bool]) -> int | None:
    """Smallest n in 1.._MAX_SEQS for which the monotone ``holds`` is true."""
    if not holds(_MAX_SEQS):
        return None
    low, high = 1, _MAX_SEQS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
