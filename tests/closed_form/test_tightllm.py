"""What the integer program minimises is what a fenced schedule takes, layer by layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.cost.model import CostModel
from policies.drive import Decision, StepContext
from policies.homes import Homes
from policies.ilp import plan
from policies.plan.link import link
from policies.plan.op import Attention, Kind
from policies.plan.predict import predict
from policies.schedule import zigzag
from policies.slot_problem import objective
from policies.spec.workload import Batch, Block
from policies.step_ops import Zigzag
from policies.step_tables import StepTables
from policies.tightllm import TightLLM
from tests.policies_table import OPT, SMALL

STEP = 3
ROUNDING = 1e-7  # the program prices all slices like the first; they differ by a byte
# No synchronisation cost, or the fences that make the objective exact would add to it.
FREE_SYNC = replace(SMALL, sync_s=0.0, gpu_bytes=64e9)


def context(batches: tuple[Batch, ...], hardware=FREE_SYNC) -> StepContext:
    block = Block(0, batches, 8)
    model = replace(OPT, n_layers=4)
    placement = TightLLM().place(model, hardware, [block])
    homes = tuple(Homes.headed(0, b.prompt_len + STEP - 1) for b in batches)
    belief = CostModel(model, hardware, placement)
    return StepContext(STEP, block, model, hardware, placement, belief, homes, {})


def tables_of(ctx: StepContext) -> StepTables:
    heads = (0,) * ctx.n_batches
    return StepTables(
        ctx, ctx.n_ctx(), heads, attention=Attention.FUSED, n_slices=None, serial_links=False
    )


def layer_s(ctx: StepContext, decision: Decision) -> float:
    """Time of a layer in the middle of a step with a fence after every batch."""
    ops = list(zigzag(ctx, decision, decision, Zigzag(fence=True)))
    ends = [end for _, end in predict(link(ops), ctx.belief.seconds)]
    fences = {op.layer: end for op, end in zip(ops, ends, strict=True) if op.kind is Kind.FENCE}
    return fences[2] - fences[1]


@pytest.mark.parametrize("disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize(
    "batches", [(Batch(32, 700),) * 3, (Batch(32, 700), Batch(32, 400), Batch(7, 100))],
    ids=["uniform", "ragged"],
)  # fmt: skip
def test_objective_is_the_time_of_a_fenced_layer(batches, disk):
    hardware = replace(FREE_SYNC, host_bytes=0.85e9) if disk else FREE_SYNC
    ctx = context(batches, hardware)
    assert (ctx.placement.kv[0].disk > 0) == disk
    tables = tables_of(ctx)
    assert tables.n_slices > 1
    candidates = tuple((0, n // 4, n) for n in ctx.n_ctx())
    problem = tables.sliced(candidates)
    for choice, slices in (
        ((0, 0, 0), (tables.n_slices, 0, 0)),
        ((1, 1, 1), (2, 2, tables.n_slices - 4)),
        ((0, 1, 2), (0, 1, tables.n_slices - 1)),
        ((2, 2, 0), (1, tables.n_slices - 1, 0)),
    ):
        tails = tuple(candidates[b][i] for b, i in enumerate(choice))
        found = layer_s(ctx, Decision(tails, slices))
        expected = objective(problem, choice, slices)
        if disk:  # a slice waits for its own read, so reading and copying overlap but for one
            assert expected <= found * (1 + ROUNDING)
            assert found <= objective(replace(problem, serial_links=True), choice, slices)
        else:
            assert found == pytest.approx(expected, rel=ROUNDING)


def test_uniform_optimum_beats_even_and_none():
    """The decision of the program is at least as fast, fenced, as any even split."""
    ctx = context((Batch(32, 700),) * 3)
    tables = tables_of(ctx)
    best = plan(tables.sliced, ctx.n_ctx(), "dp")
    found = layer_s(ctx, Decision(best.n_recompute, best.slices))
    assert found == pytest.approx(best.objective_s, rel=ROUNDING)
    third = tables.n_slices // 3
    even = (third, third, tables.n_slices - 2 * third)
    for n in range(0, 700, 50):
        assert found <= layer_s(ctx, Decision((n,) * 3, even)) * (1 + 1e-6)
    assert found < layer_s(ctx, Decision((0,) * 3, (tables.n_slices, 0, 0)))


def test_transfer_of_the_wrong_batch_is_noticed():
    """If a batch's own KV moved while it computes, ragged batches would give another time."""
    ctx = context((Batch(32, 700), Batch(32, 100)))
    tables = tables_of(ctx)
    problem = tables.sliced(((699,), (0,)))  # slot 0 computes for long, slot 1 loads
    wrong = replace(problem, kv_h2d_s=problem.kv_h2d_s[::-1])
    slices = (0, tables.n_slices)
    found = layer_s(ctx, Decision((699, 0), slices))
    assert found == pytest.approx(objective(problem, (0, 0), slices), rel=ROUNDING)
    assert found != pytest.approx(objective(wrong, (0, 0), slices), rel=1e-2)
