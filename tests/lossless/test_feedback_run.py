"""Closed loop in the engine: decisions that change while a plan runs change no token.

A belief that is far from the twin makes policies change their minds; a fickle policy decides
anything at all. What may be decided is bounded before the run, and a step that breaks its bounds is
refused.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from policies.cost.model import CostModel
from policies.drive import IN_FLIGHT, Decision, StepContext, drive_steps, with_inputs
from policies.mixed import Mixed
from policies.placement import Placement
from policies.plan.link import link
from policies.plan.memory import place
from policies.plan.op import LANE_OF, Lane, Op
from policies.run_request import RunRequest
from policies.schedule import zigzag
from policies.spec.hardware import HardwareProfile, Link
from policies.spec.model import ModelSpec
from policies.spec.workload import Batch, Block
from policies.tightllm import TightLLM
from policies.trace.check import check_causality, check_clock, check_keys
from policies.trace.metrics import metrics
from real import closed_loop
from real.feedback_plan import FeedbackPlan
from real.geometry import Geometry
from real.lanes import HostClock
from real.scan import check_within, envelope, scan
from tests.lossless.engine import FAMILIES, JOBS, in_dtype, job, overflowing, run
from tests.lossless.mixes import StandIn
from tests.lossless.test_every_policy import check, plain
from tests.policies_table import OPT, SMALL

# What is believed of the link is wrong by four orders of magnitude: all is recomputed at first.
SLOW_LINK = replace(SMALL, h2d=Link(1e-5, 1e5))
LONG = job([Block(0, (Batch(2, 9), Batch(3, 6)), 8), Block(1, (Batch(2, 5),), 4)])
RAGGED = job([Block(0, (Batch(3, 7), Batch(2, 5)), 6)], lengths=[7, 1, 4, 5, 2])
WORK = {"long": LONG, "ragged": RAGGED}
CLOSED = {
    "mixed": Mixed(solver="dp", bucket_tokens=1, feedback=True),
    "tightllm": TightLLM(solver="dp", bucket_tokens=1, feedback=True),
}


@dataclass(frozen=True, slots=True)
class Fickle(StandIn):
    """Tails and slices at random, whatever is believed; a head of each sequence as inputs."""

    seed: int = 0
    head: int = 0
    n_slices: int = 1
    feedback: bool = True
    name: str = "fickle"

    def place(
        self, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
    ) -> Placement:
        inputs = tuple(
            tuple(min(self.head, b.prompt_len + block.max_new - 1) for b in block.batches)
            for block in blocks
        )
        return place(model, hardware, blocks, self.buffers, inputs=inputs)

    def decide(self, ctx: StepContext) -> Decision:
        draw = random.Random(f"{self.seed}/{ctx.block.index}/{ctx.step}")  # noqa: S311
        tails = tuple(draw.choice((0, n, draw.randint(0, n))) for n in ctx.n_ctx())
        n_slices = draw.choice((1, self.n_slices))
        decision = Decision(tails, (*(0,) * (ctx.n_batches - 1), n_slices))
        heads = ctx.placement.inputs[ctx.block.index]
        return with_inputs(decision, heads, ctx.n_stored, ctx.n_ctx())

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        return zigzag(ctx, now, then, self.how)


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", CLOSED)
def test_a_changed_mind_changes_no_token(policy: str, family: str, work: str) -> None:
    outcome = run(FAMILIES[family], WORK[work], CLOSED[policy], "float32", hardware=SLOW_LINK,
                  delay_seed=1)  # fmt: skip
    assert outcome.tokens == plain(FAMILIES[family], WORK[work], "float64")[0]
    first, last = outcome.decisions[0, 1], outcome.decisions[0, 5]
    assert first.n_recompute != (0, 0), "the belief was not wrong"
    assert first.n_recompute != last.n_recompute, "no mind was changed"
    linked = list(link(outcome.ops))
    check_keys(outcome.trace, linked)
    check_clock(outcome.trace, 0.0)
    check_causality(outcome.trace, linked, 0.0)


@pytest.mark.parametrize(("seed", "head"), [(0, 0), (1, 3), (2, 3), (3, 100)])
def test_any_decisions_are_lossless(seed: int, head: int) -> None:
    outcome = run(FAMILIES["llama"], LONG, Fickle(seed, head), delay_seed=seed)
    check(outcome, *plain(FAMILIES["llama"], LONG, "float64"))


@pytest.mark.parametrize("share", [0.75, 0.4])
def test_any_decisions_with_homes_on_disk(share: float, tmp_path: Path) -> None:
    model = in_dtype(FAMILIES["opt"], "float64")
    policy = Fickle(4, head=4)
    hardware = overflowing(model, LONG.blocks, policy, share)
    outcome = run(model, LONG, policy, hardware=hardware, disk_dir=tmp_path)
    check(outcome, *plain(FAMILIES["opt"], LONG, "float64"))
    assert any(LANE_OF[op.kind] is Lane.DISK for op in outcome.ops)


@pytest.mark.parametrize("work", ["one-token", "all-ones", "two-blocks"])
@pytest.mark.parametrize("policy", CLOSED)
def test_degenerate_jobs(policy: str, work: str) -> None:
    model = replace(FAMILIES["llama"], n_layers=1)
    outcome = run(model, JOBS[work], CLOSED[policy], hardware=SLOW_LINK)
    check(outcome, *plain(model, JOBS[work], "float64"))


def test_one_thread_may_issue_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU without host lanes: the twin runs an op where it is issued."""
    monkeypatch.setattr(HostClock, "is_async", lambda _self, _lane: True)
    monkeypatch.setattr(HostClock, "wait", lambda _self, _lane, _index: None)
    outcome = run(FAMILIES["llama"], LONG, CLOSED["mixed"], hardware=SLOW_LINK)
    check(outcome, *plain(FAMILIES["llama"], LONG, "float64"))
    starts = [span.start_s for span in outcome.trace.spans]
    assert starts == sorted(starts), "ops were not issued in program order"


# ---- what a decision may know --------------------------------------------------------------------


def test_what_a_decision_is_told_is_old_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops of steps up to s-2, each once, with the times of the trace; all forwards among them."""
    told, asked = [], []
    ended = closed_loop.ClosedLoop.ended

    def listening(self, block, step):  # type: ignore[no-untyped-def]
        pairs = ended(self, block, step)
        asked.append((block, step))
        assert all((op.block, op.step) <= (block, step) for op, _ in pairs)
        at_most = {(op.block, op.step) for op, _ in pairs if op.lane is Lane.COMPUTE}
        seen = {(op.block, op.step) for op, _ in told if op.lane is Lane.COMPUTE}
        if step >= 0:
            assert (block, step) in at_most | seen
        told.extend(pairs)
        return pairs

    monkeypatch.setattr(closed_loop.ClosedLoop, "ended", listening)
    outcome = run(FAMILIES["opt"], LONG, CLOSED["tightllm"], delay_seed=3)
    assert asked == [(b.index, s - 2) for b in LONG.blocks for s in range(b.max_new)]
    spans = {span.key: span for span in outcome.trace.spans}
    assert len({op.key for op, _ in told}) == len(told)
    assert all(spans[op.key] == span for op, span in told)
    early = {op.key for op in outcome.ops if op.block == 0 and op.lane is Lane.COMPUTE}
    assert early <= {op.key for op, _ in told}


def test_times_of_planning_are_kept_for_every_step() -> None:
    outcome = run(FAMILIES["opt"], LONG, CLOSED["tightllm"], keep=True)
    loop = outcome.backend.loop
    assert loop is not None
    n_steps = sum(block.max_new for block in LONG.blocks)
    assert len(loop.host_s) == len(loop.late_s()) == n_steps - IN_FLIGHT
    assert all(seconds > 0 for seconds in loop.host_s)
    assert all(0 <= late < outcome.trace.makespan_s for late in loop.late_s())
    outcome.backend.close()


def test_an_error_while_planning_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self, ctx):  # type: ignore[no-untyped-def]
        if ctx.step == 5:
            raise RuntimeError("no decision")
        return decide(self, ctx)

    decide = Fickle.decide
    monkeypatch.setattr(Fickle, "decide", failing)
    monkeypatch.setattr(FeedbackPlan, "bounds", _without_open_loop)  # it would fail at once
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no decision"):
        run(FAMILIES["opt"], LONG, Fickle())
    assert threading.active_count() == before


def _without_open_loop(self: FeedbackPlan) -> Iterator[Iterator[Op]]:
    plans = _BOUNDS(self)
    next(plans)
    return plans


_BOUNDS = FeedbackPlan.bounds


# ---- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_layers", [1, 2, 3])
@pytest.mark.parametrize("n_batches", [1, 2, 3])
def test_plans_before_the_run_bound_any_decisions(n_layers: int, n_batches: int) -> None:
    sizes = ((2, 9), (3, 6), (1, 11))[:n_batches]
    blocks = (Block(0, tuple(Batch(*size) for size in sizes), 6), Block(1, (Batch(2, 4),), 3))
    model = in_dtype(replace(OPT, n_layers=n_layers), "float32")  # wide enough for slices
    for seed, head, share, cut in ((0, 0, 9.0, None), (1, 4, 0.8, None), (2, 7, 0.3, 3)):
        policy = Fickle(head=head, n_slices=3)
        hardware = overflowing(model, blocks, policy, share)
        costs = CostModel(model, hardware, policy.place(model, hardware, blocks))
        geometry = Geometry(model, costs.placement, blocks, torch.float32)
        request = RunRequest("bound", model, hardware, policy, blocks, dtype="float32",
                             steps_run=cut)  # fmt: skip
        plans = list(_without_open_loop(FeedbackPlan(request, costs)))
        booked = envelope([scan(link(ops), geometry) for ops in plans])
        for attempt in range(10):
            fickle = replace(request, policy=replace(policy, seed=100 * seed + attempt))
            check_within(scan(link(fickle.plan(costs)), geometry), booked)


def test_a_plan_beyond_its_bounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_only(self: FeedbackPlan) -> Iterator[Iterator[Op]]:
        return iter([next(_BOUNDS(self))])

    monkeypatch.setattr(FeedbackPlan, "bounds", first_only)
    with pytest.raises(ValueError, match="the plan needs"):
        run(FAMILIES["llama"], LONG, CLOSED["tightllm"], hardware=SLOW_LINK)


@pytest.mark.parametrize("steps_run", [0, 1, 3])
def test_a_cut_plan_is_that_of_the_request(steps_run: int) -> None:
    """Told nothing, the loop decides as in open loop, and cuts where the request does."""
    model = in_dtype(FAMILIES["opt"], "float32")
    policy = Fickle(head=3)
    costs = CostModel(model, SMALL, policy.place(model, SMALL, LONG.blocks))
    request = RunRequest("cut", model, SMALL, policy, LONG.blocks, dtype="float32",
                         steps_run=steps_run)  # fmt: skip
    whole, mine = [], []
    ops = list(request.plan(costs, lambda *where: whole.append(where)))
    steps = FeedbackPlan(request, costs).steps(
        lambda _block, _step: (), lambda *where: mine.append(where)
    )
    assert [op for step in steps for op in step] == ops
    assert mine == whole
    assert any(drive_steps(policy, LONG.blocks, costs))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("policy", [*CLOSED, "fickle"])
def test_float32_tokens_on_cuda(policy: str, work: str) -> None:
    chosen = CLOSED.get(policy, Fickle(5, head=4))
    outcome = run(FAMILIES["llama"], WORK[work], chosen, "float32", hardware=SLOW_LINK,
                  device=torch.device("cuda", 0), delay_seed=1)  # fmt: skip
    assert outcome.tokens == plain(FAMILIES["llama"], WORK[work], "float64")[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_same_plan_is_as_fast_as_in_open_loop() -> None:
    """Its decisions do not depend on what was measured: only planning beside the run is new."""
    from tests.lossless.test_gpu import big

    def decode_s(policy: Fickle) -> float:
        outcome = big(policy)
        try:
            return metrics(outcome.trace).decode_s
        finally:
            outcome.backend.close()
            outcome.backend.arenas.close()

    closed = Fickle(6, head=200)
    open_loop = replace(closed, feedback=False)
    best = {policy: min(decode_s(policy) for _ in range(3)) for policy in (open_loop, closed)}
    assert best[closed] < 1.03 * best[open_loop]
