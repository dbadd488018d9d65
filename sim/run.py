"""One run: a policy over a job on a simulated machine, from settings to record.

Blocks of requests are separated by a fence, so they are simulated one at a time and their times
added: memory stays that of the largest block however long the job is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

from policies.cost.model import CostModel
from policies.drive import Policy, wants_feedback
from policies.errors import Infeasible, OutOfMemory
from policies.placement import Placement, block_kv_bytes
from policies.plan.memory import Buffers, block_pools, check_run, run_pools
from policies.plan.op import Attention, Lane
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from policies.trace.attribution import Category
from policies.trace.decisions import StepDecision
from policies.trace.sources import inputs_share, source_columns
from policies.trace.span import Span, parse_key
from sim.decisions import DecisionLog
from sim.executors import (
    ENGINES,
    EVERY_STEP,
    NOT_KNOWN_BEFORE,
    BlockTimes,
    fast_blocks,
    simpy_blocks,
)
from sim.job import WorkloadSpec, make_job
from sim.memory import Ledger
from sim.pack import Job
from sim.program_cache import ProgramCache
from sim.remedy import WOULD_HELP, Sizes, remedy
from sim.result import RunRecord
from sim.tracing import UntraceableError

AUTO_TRACE_OPS = 200_000  # above this many ops ``trace=auto`` keeps the first steps only
TRACED_STEPS = 3  # prefill and two decode steps
TRACE_MODES = ("auto", "full", "none")


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Everything that a run depends on.

    The policy reasons with ``belief``, the simulation charges ``hardware``; None means that it
    knows its machine exactly. ``engine`` is the executor, ``auto`` the compiled one where it can
    run the policy; the record says which ran.
    """

    model: ModelSpec
    hardware: HardwareProfile
    policy: Policy
    workload: WorkloadSpec
    belief: HardwareProfile | None = None
    trace: str = "auto"
    seed: int = 0
    engine: str = "auto"

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine: {self.engine!r} is none of {', '.join(ENGINES)}")
        if self.engine == "fast" and wants_feedback(self.policy):
            raise ValueError(NOT_KNOWN_BEFORE)
        if self.trace not in TRACE_MODES:
            raise ValueError(f"trace: {self.trace!r} is none of {', '.join(TRACE_MODES)}")


@dataclass(frozen=True, slots=True)
class RunResult:
    """A record and, where the run took place, its decisions and the spans that were kept."""

    record: RunRecord
    decisions: Collection[StepDecision] = ()
    spans: tuple[Span, ...] = ()
    job: Job | None = None


@dataclass(slots=True)
class _Tally:
    """What a run accumulates over its blocks; spans as long as ``mode`` may want them whole."""

    mode: str
    lane_s: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(Lane, 0.0))
    busy_s: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(Lane, 0.0))
    waits_s: dict[Category, float] = field(default_factory=lambda: dict.fromkeys(Category, 0.0))
    clock_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_weight: float = 0.0
    tpot_weight: float = 0.0
    tpot_seqs: int = 0
    n_ops: int = 0
    n_beliefs: int = 1
    spans: list[Span] = field(default_factory=list)

    def add(self, block: Block, times: BlockTimes) -> None:
        """Add one block at the end of the run so far."""
        for category, seconds in times.waits_s.items():
            self.waits_s[category] += seconds
        for lane, seconds in times.lane_s.items():
            self.lane_s[lane] += seconds
            self.busy_s[lane] += times.busy_s[lane]
        self.prefill_s += times.prefill_s
        self.decode_s += times.decode_s
        self.ttft_weight += block.n_seqs * times.prefill_s
        if block.max_new > 1:
            self.tpot_weight += block.n_seqs * times.decode_s / (block.max_new - 1)
            self.tpot_seqs += block.n_seqs
        at = self.clock_s
        spans = times.spans
        if at:
            spans = tuple(s._replace(start_s=s.start_s + at, end_s=s.end_s + at) for s in spans)
        self.spans.extend(spans)
        self.clock_s += times.makespan_s
        self.n_ops += times.n_ops
        self.n_beliefs = times.n_beliefs

    def steps_to_keep(self, n_ops: int) -> int:
        """Leading steps of the next block, of ``n_ops`` ops, whose spans may be wanted."""
        total = self.n_ops + n_ops
        if self.mode == "full" or (self.mode == "auto" and total <= AUTO_TRACE_OPS):
            return EVERY_STEP
        return TRACED_STEPS if self.mode == "auto" and not self.n_ops else 0


def simulate(
    spec: RunSpec,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    known: ProgramCache | None = None,
    job: Job | None = None,
    placement: Placement | None = None,
) -> RunResult:
    """Run a job; infeasible work becomes a record. ``progress(blocks done, blocks)`` is called.

    ``job`` and ``placement`` are those of ``spec``, from a caller that has made them already. Runs
    that are alike are faster with the same ``known``, and not different. ``ValueError`` for
    settings or traces that are wrong rather than infeasible.
    """
    base = RunRecord(
        policy=spec.policy.name,
        model=spec.model.name,
        n_layers=spec.model.n_layers,
        hardware=spec.hardware.name,
        workload=spec.workload.name,
        limit=spec.workload.limit,
        max_new=spec.workload.max_new,
        seed=spec.seed,
        feedback=wants_feedback(spec.policy),
    )
    try:
        job = job or make_job(spec.workload, spec.model, spec.hardware, spec.policy, spec.seed)
    except Infeasible as error:
        return RunResult(_amend(base, status="infeasible", reason=error.reason))
    blocks = spec.policy.blocks(job.blocks)
    base = _amend(base, **_job_columns(job, blocks))
    placement = placement or spec.policy.place(spec.model, spec.hardware, blocks)
    base = _amend(base, **_placement_columns(spec.model, placement, blocks))
    try:
        peaks = book(spec.model, spec.hardware, placement, spec.policy.buffers, blocks)
    except OutOfMemory as error:
        sizes = Sizes(spec.workload.source == "fixed", max(len(b.batches) for b in job.blocks))
        helps = remedy(error, spec.model, spec.hardware, placement, spec.policy, blocks, sizes)
        record = _amend(
            base,
            status="oom",
            reason=f"{error}{WOULD_HELP}{helps}",
            oom_tier=error.tier,
            need_bytes=error.need_bytes,
            have_bytes=error.have_bytes,
        )
        return RunResult(record, job=job)
    return _execute(spec, base, job, blocks, placement, peaks, progress, known)


def book(
    model: ModelSpec,
    hardware: HardwareProfile,
    placement: Placement,
    buffers: Buffers,
    blocks: tuple[Block, ...],
) -> dict[str, int]:
    """Peak bytes per tier over the run; ``OutOfMemory`` where a block does not fit."""
    check_run(model, hardware, placement, buffers, blocks)
    ledger = Ledger({t: hardware.usable_bytes(t) for t in ("gpu", "host", "disk")}, audit=False)
    for pool in run_pools(model, placement, buffers):
        ledger.allocate(pool.name, pool.tier.value, pool.nbytes)
    for block in blocks:
        pools = block_pools(model, placement, buffers, block)
        for pool in pools:
            ledger.allocate(pool.name, pool.tier.value, pool.nbytes)
        for pool in pools:
            ledger.free(pool.name)
    return ledger.peak_bytes


def _execute(
    spec: RunSpec,
    base: RunRecord,
    job: Job,
    blocks: tuple[Block, ...],
    placement: Placement,
    peaks: dict[str, int],
    progress: Callable[[int, int], None],
    known: ProgramCache | None,
) -> RunResult:
    plant = CostModel(spec.model, spec.hardware, placement)
    belief = plant if spec.belief is None else CostModel(spec.model, spec.belief, placement)
    engine = "simpy" if spec.engine == "simpy" or wants_feedback(spec.policy) else "fast"
    try:
        tally, decided = _run_blocks(engine, spec, blocks, plant, belief, progress, known)
    except UntraceableError:
        if spec.engine != "auto":
            raise
        engine = "simpy"
        tally, decided = _run_blocks(engine, spec, blocks, plant, belief, progress, known)
    spans, mode = _trace(tally)
    record = _amend(
        base,
        **_time_columns(tally, job),
        **{f"peak_{tier}_bytes": peak for tier, peak in peaks.items()},
        **source_columns(decided.sources(placement, _all_on_cpu(spec.policy))),
        solver=" ".join(sorted(decided.solvers)),
        solve_s=decided.solve_s,
        feedback_belief_changes=tally.n_beliefs - 1 if base.feedback else None,
        extrapolated=" ".join(sorted(plant.extrapolated)),
        trace=mode,
        engine=engine,
    )
    return RunResult(record, decided, spans, job)


def _all_on_cpu(policy: Policy) -> bool:
    """Whether a policy attends all KV on the CPU; those that do so for a part decide who."""
    return policy.buffers.attention is Attention.CPU


def _run_blocks(
    engine: str,
    spec: RunSpec,
    blocks: tuple[Block, ...],
    plant: CostModel,
    belief: CostModel,
    progress: Callable[[int, int], None],
    known: ProgramCache | None,
) -> tuple[_Tally, DecisionLog]:
    tally, decided = _Tally(spec.trace), DecisionLog(blocks)
    run = simpy_blocks if engine == "simpy" else partial(fast_blocks, known=known)
    times = run(spec.policy, blocks, plant, belief, decided.observe, tally.steps_to_keep)
    for index, block_times in enumerate(times):
        tally.add(blocks[index], block_times)
        progress(index + 1, len(blocks))
    return tally, decided


def _trace(tally: _Tally) -> tuple[tuple[Span, ...], str]:
    """The spans to keep and what they are called in the record."""
    if tally.mode == "none":
        return (), "none"
    if tally.mode == "full" or tally.n_ops <= AUTO_TRACE_OPS:
        return tuple(tally.spans), "full"
    first = tally.spans[0].key.split("/")[1]
    kept = []
    for span in tally.spans:
        parts = parse_key(span.key)
        if f"g{parts.block}" == first and parts.step < TRACED_STEPS:
            kept.append(span)
    return tuple(kept), "first steps"


def _amend(record: RunRecord, **columns: object) -> RunRecord:
    return replace(record, **columns)  # type: ignore[arg-type]


def _job_columns(job: Job, blocks: tuple[Block, ...]) -> dict[str, object]:
    return {
        "n_requests": job.n_requests,
        "n_rejected": job.n_rejected,
        "n_too_long": job.n_too_long,
        "n_cut": job.n_cut,
        "padding_waste": job.padding_waste,
        "prompt_len": max(b.prompt_len for block in blocks for b in block.batches),
        "gen_len": max(block.max_new for block in blocks),
        "batch_size": max(b.n_seqs for block in blocks for b in block.batches),
        "n_batches": max(len(block.batches) for block in blocks),
        "n_blocks": len(blocks),
    }


def _placement_columns(
    model: ModelSpec, placement: Placement, blocks: tuple[Block, ...]
) -> dict[str, object]:
    """Effective shares: weights by bytes, KV by the bytes of all blocks, inputs by tokens."""
    total = model.layers_bytes()
    kv = [block_kv_bytes(model, block) for block in blocks]
    columns: dict[str, object] = {}
    for tier in ("gpu", "host", "disk"):
        columns[f"weights_{tier}"] = placement.total_weight_bytes(model, tier) / total
        held = sum(n * getattr(s, tier) for n, s in zip(kv, placement.kv, strict=True))
        columns[f"kv_{tier}"] = held / sum(kv)
    columns["inputs_share"] = inputs_share(blocks, placement)
    return columns


def _time_columns(tally: _Tally, job: Job) -> dict[str, object]:
    makespan_s = tally.clock_s
    bound_s = max(tally.lane_s.values())
    waits = {c: s / makespan_s for c, s in tally.waits_s.items()}
    named = {f"wait_{c.value}": share for c, share in waits.items() if c is not Category.IDLE}
    busy = {lane: s / makespan_s for lane, s in tally.busy_s.items()}
    decode = job.decode_tokens / tally.decode_s if job.decode_tokens else None
    return {
        "prefill_tokens_per_s": job.prompt_tokens / tally.prefill_s,
        "decode_tokens_per_s": decode,
        "ttft_s": tally.ttft_weight / job.n_requests,
        "tpot_s": tally.tpot_weight / tally.tpot_seqs if tally.tpot_seqs else None,
        "prefill_s": tally.prefill_s,
        "decode_s": tally.decode_s,
        "makespan_s": makespan_s,
        "gpu_busy": busy[Lane.COMPUTE],
        "h2d_busy": busy[Lane.H2D],
        "d2h_busy": busy[Lane.D2H],
        "disk_busy": busy[Lane.DISK],
        "cpu_busy": busy[Lane.CPU],
        "bottleneck": max(waits, key=lambda c: waits[c]).value,
        **named,
        "lower_bound_s": bound_s,
        "bound_ratio": makespan_s / bound_s,
        "n_ops": tally.n_ops,
    }
