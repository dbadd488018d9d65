"""One measured run: a request in, a trace and a flat record out.

Times are read from the trace by the same functions that read simulated ones. What readers get
wrong: setting up (pinning, weights, warm-up) and the policy's solver are not part of any time; they
are reported beside it. A policy with feedback solves during the run, beside a step that runs; where
that was not enough time, ``feedback_late_s`` says so and the times contain it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from policies.cost.model import CostModel
from policies.drive import Decision, wants_feedback
from policies.errors import OutOfMemory
from policies.placement import Placement
from policies.plan.memory import block_pools, check_run, run_pools
from policies.plan.op import Attention, Lane, Tier
from policies.run_request import RunRequest
from policies.spec.workload import Block
from policies.trace.attribution import Category, attribute
from policies.trace.decisions import StepDecision, step_decisions
from policies.trace.metrics import TraceMetrics, metrics
from policies.trace.sources import Run, inputs_share, mean_sources, source_columns
from policies.trace.span import Trace, parse_key
from real.architecture import DTYPES
from real.backend import RealBackend
from real.checkpoint import Random
from real.feedback_plan import FeedbackPlan
from real.machine import environment, peak_host_bytes
from real.setup import Arenas, Prompts, Setup

_FIRST_ID = 4  # the ids below are special in most vocabularies


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one execution of a request gave. ``trace`` is None where it did not fit.

    ``decisions`` of a closed loop that was cut have one step more: it says what the last stored.
    """

    record: dict[str, object]
    trace: Trace | None = None
    decisions: tuple[StepDecision, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Options:
    """How to run, apart from what the request says."""

    device: torch.device
    disk_dir: Path
    repeat: int = 1
    poison: bool = False
    delay_seed: int | None = None

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise ValueError(f"repeat: {self.repeat} must be >= 1")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("device: cuda is not available here; cpu runs the same plans")
        if not self.disk_dir.is_dir():
            raise ValueError(f"disk-dir: {self.disk_dir} is not a folder")


def random_prompts(request: RunRequest) -> list[list[int]]:
    """Prompts of a request: full-length, drawn from its seed in the job's order of sequences."""
    draw = np.random.default_rng(request.seed)
    low = min(_FIRST_ID, request.model.vocab - 1)
    return [
        draw.integers(low, request.model.vocab, batch.prompt_len).tolist()
        for block in request.blocks
        for batch in block.batches
        for _ in range(batch.n_seqs)
    ]


def run_request(request: RunRequest, options: Options, arenas: Arenas) -> Iterator[RunResult]:
    """Run a request ``options.repeat`` times; work that does not fit is one result that says so."""
    blocks = request.policy.blocks(request.blocks)
    base = _base(request, blocks, options)
    placement = request.policy.place(request.model, request.machine, blocks)
    costs = CostModel(request.model, request.machine, placement)
    decided: list[tuple[int, int, Decision]] = []
    backend = RealBackend(_setup(request, options, placement, blocks), costs, arenas)
    try:
        check_run(request.model, request.machine, placement, request.policy.buffers, blocks)
        if options.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(options.device)
        closed = FeedbackPlan(request, costs) if wants_feedback(request.policy) else None

        def observe(block: int, step: int, decision: Decision) -> None:
            decided.append((block, step, decision))

        if closed is None:
            backend.prepare(request.plan(costs, observe))
        else:
            backend.prepare_steps(closed.bounds())
        for repeat in range(options.repeat):
            if closed is None:
                trace = backend.execute()
            else:
                decided.clear()
                trace = backend.execute_steps(lambda ended: closed.steps(ended, observe))
            tokens = tuple(map(tuple, backend.tokens()))
            record = base | {"status": "ok", "repeat": repeat}
            record |= _times(trace, request, blocks) | _waits(backend, trace)
            record |= _decision_columns(decided, request, placement, blocks)
            record |= _feedback(backend, closed)
            record |= _memory(request, placement, blocks, backend)
            record |= {"tokens_sha256": _checksum(tokens), **environment(options.device)}
            taken = [*decided, *(closed.behind if closed else ())]
            yield RunResult(record, trace, tuple(_decisions(taken, blocks)), tokens)
    except (OutOfMemory, torch.OutOfMemoryError) as error:
        facts: dict[str, object] = {"oom_tier": "gpu"}
        if isinstance(error, OutOfMemory):
            facts = {
                "oom_tier": error.tier,
                "need_bytes": error.need_bytes,
                "have_bytes": error.have_bytes,
            }
        yield RunResult(base | {"status": "oom", "reason": str(error), **facts})
    finally:
        backend.close()


def _setup(
    request: RunRequest, options: Options, placement: Placement, blocks: tuple[Block, ...]
) -> Setup:
    """What the engine runs; limits the allocator to the request's cap."""
    dtype = DTYPES[request.dtype]
    return Setup(
        model=request.model,
        placement=placement,
        blocks=blocks,
        dtype=dtype,
        device=options.device,
        source=Random(request.seed, dtype, options.device),
        prompts=random_prompts(request),
        gpu_bytes=cap_gpu(request, options.device),
        disk_dir=options.disk_dir,
        poison=options.poison,
        delay_seed=options.delay_seed,
    )


def cap_gpu(request: RunRequest, device: torch.device) -> int | None:
    """Limit the allocator to the request's cap; the bytes that the run may use."""
    cap = request.gpu_mem_cap_bytes
    if device.type != "cuda":
        return int(request.machine.usable_bytes("gpu"))
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(
        1.0 if cap is None else min(1.0, cap / total), device
    )
    return cap


# ---- the record -----------------------------------------------------------------------------


def _base(request: RunRequest, blocks: Sequence[Block], options: Options) -> dict[str, object]:
    return {
        "policy": request.policy.name,
        "model": request.model.name,
        "n_layers": request.model.n_layers,
        "hardware": request.hardware.name,
        "workload": request.name,
        "dtype": request.dtype,
        "seed": request.seed,
        "engine": "cuda" if options.device.type == "cuda" else "cpu-twin",
        "n_requests": sum(block.n_seqs for block in blocks),
        "prompt_len": max(b.prompt_len for block in blocks for b in block.batches),
        "gen_len": max(block.max_new for block in blocks),
        "steps_run": max(request.last_step(block) for block in blocks),
        "batch_size": max(b.n_seqs for block in blocks for b in block.batches),
        "n_batches": max(len(block.batches) for block in blocks),
        "n_blocks": len(blocks),
        "gpu_mem_cap_bytes": request.gpu_mem_cap_bytes,
        "status": "failed",
        "reason": "",
    }


def _times(trace: Trace, request: RunRequest, blocks: Sequence[Block]) -> dict[str, object]:
    """Times and rates, from the trace; tokens of prompts without padding."""
    measured = metrics(trace)
    prompt_tokens = sum(b.n_seqs * b.prompt_len for block in request.blocks for b in block.batches)
    decoded = sum(
        block.n_seqs * len(steps) for block, steps in zip(blocks, measured.step_s, strict=True)
    )
    seconds = sum(sum(steps) for steps in measured.step_s)
    decodes = [sum(steps) / len(steps) for steps in measured.step_s if steps]
    lane_s = {lane: share * measured.makespan_s for lane, share in measured.busy.items()}
    bound_s = max(lane_s.values())
    return {
        "prefill_s": measured.prefill_s,
        "step_s": [list(steps) for steps in measured.step_s],
        "decode_s": measured.decode_s,
        "makespan_s": measured.makespan_s,
        "prefill_tokens_per_s": prompt_tokens / measured.prefill_s,
        "decode_tokens_per_s": decoded / seconds if decoded else None,
        "ttft_s": fmean(measured.ttft_s),
        "tpot_s": fmean(decodes) if decodes else None,
        "gpu_busy": measured.busy[Lane.COMPUTE],
        "h2d_busy": measured.busy[Lane.H2D],
        "d2h_busy": measured.busy[Lane.D2H],
        "disk_busy": measured.busy[Lane.DISK],
        "cpu_busy": measured.busy[Lane.CPU],
        "lower_bound_s": bound_s,
        "bound_ratio": measured.makespan_s / bound_s,
        "h2d_bytes_per_s": h2d_rates(trace),
        **_decode_bound(trace, measured),
    }


def h2d_rates(trace: Trace) -> list[list[float | None]]:
    """Bytes over busy time of H2D for each step of each block, prefill first; None: it was idle.

    A link is slower for seconds at a time where a host is shared, whichever memory the copies come
    from. This is where such a phase shows; only repeats tell its cost.
    """
    moved: dict[int, dict[int, tuple[int, float]]] = {}
    for span in trace.spans:
        key = parse_key(span.key)
        nbytes, busy_s = moved.setdefault(key.block, {}).get(key.step, (0, 0.0))
        if span.lane is Lane.H2D:
            nbytes, busy_s = nbytes + span.nbytes, busy_s + span.end_s - span.start_s
        moved[key.block][key.step] = (nbytes, busy_s)
    return [
        [nbytes / busy_s if busy_s else None for _, (nbytes, busy_s) in sorted(steps.items())]
        for _, steps in sorted(moved.items())
    ]


def _decode_bound(trace: Trace, measured: TraceMetrics) -> dict[str, object]:
    """The decode steps alone, of the first block: their time over the busiest lane's share of it.

    Lane totals count the part of each span between the end of prefill and the end of the last
    decode step.
    """
    low = measured.ttft_s[0]
    high = low + sum(measured.step_s[0])
    if high == low:
        return {"decode_bound_ratio": None, "decode_bound_lane": None}
    totals = dict.fromkeys(Lane, 0.0)
    for span in trace.spans:
        inside_s = min(span.end_s, high) - max(span.start_s, low)
        totals[span.lane] += max(inside_s, 0.0)
    lane = max(totals, key=lambda key: totals[key])
    return {"decode_bound_ratio": (high - low) / totals[lane], "decode_bound_lane": lane.value}


def _waits(backend: RealBackend, trace: Trace) -> dict[str, object]:
    """Critical-path shares; what no op explains is ``wait_idle``."""
    deps = [item.deps for item in backend.linked]
    shares = attribute(trace.spans, deps).shares
    named = {f"wait_{category.value}": share for category, share in shares.items()}
    return {**named, "bottleneck": max(Category, key=lambda c: shares.get(c, 0.0)).value}


def _decision_columns(
    decided: Sequence[tuple[int, int, Decision]],
    request: RunRequest,
    placement: Placement,
    blocks: Sequence[Block],
) -> dict[str, object]:
    cpu = request.policy.buffers.attention is Attention.CPU
    runs = (Run(g, step, step + 1, decision) for g, step, decision in decided)
    return {
        "inputs_share": inputs_share(blocks, placement),
        **source_columns(mean_sources(blocks, placement, runs, cpu)),
        "solver": " ".join(sorted({d.solver for _, _, d in decided if d.solver})),
        "solve_s": sum(d.solve_s for _, _, d in decided),
    }


def _feedback(backend: RealBackend, closed: FeedbackPlan | None) -> dict[str, object]:
    """Of a closed loop: how often the belief changed; host time of planning each step from the
    third on (re-fit, decision, ops, closures), and how late the step came (0: in time).

    Decisions before the third step's plan, and warm-up, are those of the open loop: a shape that
    first comes up during the run may meet libraries that choose its kernels then.
    """
    if closed is None or backend.loop is None:
        return {}
    late_s = backend.loop.late_s()
    return {
        "feedback": True,
        "feedback_belief_changes": closed.n_beliefs - 1,
        "feedback_host_s": list(backend.loop.host_s),
        "feedback_late_s": late_s,
        "feedback_late_sum_s": sum(late_s),
    }


def _memory(
    request: RunRequest, placement: Placement, blocks: Sequence[Block], backend: RealBackend
) -> dict[str, object]:
    """Planned by the policy's pools, planned by the engine's buffers, and really held."""
    model, buffers = request.model, request.policy.buffers
    whole = run_pools(model, placement, buffers)
    columns: dict[str, object] = {}
    for tier in Tier:
        most = max(
            sum(p.nbytes for p in block_pools(model, placement, buffers, b) if p.tier is tier)
            for b in blocks
        )
        columns[f"plan_{tier.value}_bytes"] = most + sum(p.nbytes for p in whole if p.tier is tier)
        engine = sum(need.nbytes for need in backend.wanted if need.tier is tier)
        columns[f"engine_{tier.value}_bytes"] = engine
    if backend.setup.device.type == "cuda":
        columns["peak_gpu_bytes"] = torch.cuda.max_memory_allocated(backend.setup.device)
        columns["reserved_gpu_bytes"] = torch.cuda.max_memory_reserved(backend.setup.device)
    return {
        **columns,
        "peak_host_bytes": peak_host_bytes(),
        "pinned_booked_bytes": backend.arenas.pinned.booked_bytes,
        "pinned_locked_bytes": backend.arenas.pinned.locked_bytes,
        "memory": [[need.tier.value, need.name, need.nbytes] for need in backend.wanted],
        "direct_io": backend.direct_io,
        "pin_s": backend.pin_s,
        "build_s": backend.build_s,
    }


def _decisions(
    decided: Sequence[tuple[int, int, Decision]], blocks: Sequence[Block]
) -> Iterator[StepDecision]:
    for g, step, decision in sorted(decided, key=lambda taken: taken[:2]):
        yield from step_decisions(blocks[g], step, decision)


def _checksum(tokens: Prompts) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
