"""One iteration: the recurrence over layers equals its plan run op by op."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cost.model import CostModel
from policies.cost.ragged import RaggedCosts
from policies.placement import ON_GPU, ON_HOST, Placement
from policies.plan.op import Kind, Lane, Op
from sim.engine import SimBackend
from sim.iteration import PlanCosts, Work, plan, price, timing
from tests.serving_table import machine, model

NAMES = ("tiny", "llama3.1-8b", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b")


def run(costs, work, n_store, overlap):
    """Timing in closed form, and the trace of the plan."""
    layers = price(costs, work)
    hardware, n_layers = costs.hardware, costs.model.n_layers
    store_s = costs.layer_copy_seconds(hardware.d2h, n_store)
    closed = timing(layers, overlap=overlap, duplex=hardware.duplex, store_s=n_layers * store_s)
    ops = plan(work, n_layers, n_store, 1, overlap=overlap)
    trace = SimBackend(PlanCosts(costs, layers, store_s), hardware.duplex).run(ops)
    return closed, trace


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    rows=st.integers(1, 2000),
    n_emit=st.integers(0, 50),
    attention_s=st.sampled_from([0.0, 1e-5, 1e-3]),
    n_load=st.sampled_from([0, 1, 100, 30_000]),
    disk_share=st.sampled_from([0.0, 0.3, 1.0]),
    n_store=st.sampled_from([0, 1, 500, 50_000]),
    duplex=st.sampled_from([0.5, 0.8, 1.0]),
    overlap=st.booleans(),
)
def test_closed_form_equals_the_full_plan(
    name, rows, n_emit, attention_s, n_load, disk_share, n_store, duplex, overlap
):
    costs = RaggedCosts(model(name), replace(machine("h100"), duplex=duplex))
    work = Work(rows, min(n_emit, rows), attention_s, n_load, 1, int(n_load * disk_share))
    closed, trace = run(costs, work, n_store, overlap)
    by_lane = {lane: [s for s in trace.spans if s.lane is lane] for lane in Lane}
    end = max(s.end_s for s in by_lane[Lane.COMPUTE])
    assert closed.seconds == pytest.approx(end, rel=1e-9)
    assert closed.compute_s == pytest.approx(
        sum(s.end_s - s.start_s for s in by_lane[Lane.COMPUTE]), rel=1e-9
    )
    loads = by_lane[Lane.H2D]
    assert closed.load_s == pytest.approx(sum(s.end_s - s.start_s for s in loads), rel=1e-9)
    # What the plan stores after the iteration has ended is what is left pending. While loads and
    # stores compete in the plan, those of this iteration end within it.
    stores = by_lane[Lane.D2H]
    left = max(0.0, stores[-1].end_s - end) if stores else 0.0
    assert closed.store_left_s == pytest.approx(left, rel=1e-6, abs=1e-9)


def test_one_layer_of_equal_requests_costs_what_the_cost_model_charges():
    for name in NAMES:
        spec, hardware = model(name), machine("h100")
        ragged = RaggedCosts(spec, hardware)
        weights = ((ON_GPU, ON_GPU),) * spec.n_layers
        costs = CostModel(spec, hardware, Placement(weights=weights, kv=(ON_HOST,)))
        for layer, _ in ragged.layer_classes:
            for n_seqs, n_new, n_ctx in ((1, 300, 0), (1, 40, 2000), (16, 1, 700)):
                op = Op(Kind.FORWARD, 0, 0, layer, n_seqs=n_seqs, n_new=n_new, n_ctx=n_ctx)
                if n_new == 1:
                    attention_s = ragged.decode_attention_seconds(n_seqs, n_seqs * n_ctx)
                else:
                    attention_s = n_seqs * ragged.chunk_attention_seconds(n_new, n_ctx)
                ours = ragged.layer_seconds(layer, n_seqs * n_new, attention_s)
                assert ours == pytest.approx(costs.seconds(op), rel=1e-12)


def test_layer_classes_cover_all_layers():
    assert [tuple(c) for c in RaggedCosts(model("deepseek-v3"), machine("h100")).layer_classes] == [
        (0, 3),
        (3, 58),
    ]
    assert [c.n for c in RaggedCosts(model("tiny"), machine("h100")).layer_classes] == [
        model("tiny").n_layers
    ]


def test_a_floor_stretches_compute_only():
    costs = RaggedCosts(model("llama3.1-8b"), machine("h100"))
    work = Work(8, 1, 0.0, 5000)
    plain, floored = price(costs, work), price(costs, work, floor_s=1.0)
    assert floored.compute_s == pytest.approx(1.0)
    assert floored.load_s == plain.load_s
    assert price(costs, work, floor_s=1e-9) == plain


def test_pieces_add_latency():
    costs = RaggedCosts(model("llama3.1-8b"), machine("h100"))
    link = costs.hardware.h2d
    one = costs.layer_copy_seconds(link, 4096)
    assert costs.layer_copy_seconds(link, 4096, 16) == pytest.approx(one + 15 * link.latency_s)
    assert costs.layer_copy_seconds(link, 0, 16) == 0.0


def test_attention_grows_with_context_and_can_be_left_out():
    costs = RaggedCosts(model("llama3.1-8b"), machine("h100"))
    assert costs.decode_attention_seconds(4, 8000) > costs.decode_attention_seconds(4, 4000)
    assert costs.chunk_attention_seconds(100, 5000) > costs.chunk_attention_seconds(100, 500)
    bare = RaggedCosts(model("llama3.1-8b"), machine("h100"), attention=False, lm_head=False)
    assert bare.chunk_attention_seconds(100, 5000) == 0.0 == bare.head_seconds(3)
    assert costs.head_seconds(3) > 0.0
