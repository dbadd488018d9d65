"""Seconds of an op by hand, on a machine of round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.cost.model import CostModel
from policies.placement import host_placement
from policies.plan.op import Attention, Kind, Op, Scope, Slot, Tier
from policies.spec.curve import Curve, Grid
from policies.spec.workload import Batch, Block
from tests.policies_table import MLA, MOE, OPT, SMALL

PINNED = Slot("home", Tier.HOST)
PAGEABLE = Slot("home", Tier.HOST, pinned=False)
# Constant rates, so that each term is a division.
FLAT = replace(
    SMALL,
    gemm=Curve((1, 10**6), (1e13, 1e13)),
    attention_decode=Curve((1, 10**6), (5e11, 5e11)),
    attention_prefill=Curve((1, 10**6), (2e13, 2e13)),
    attention_window=Grid((1, 10**6), (1, 10**6), ((4e12, 4e12), (4e12, 4e12))),
    launch_s=0.0,
)


def costs(model=OPT, hardware=FLAT) -> CostModel:
    block = Block(0, (Batch(8, 100),), 4)
    return CostModel(model, hardware, host_placement(model, hardware, [block]))


def forward(scope=Scope.LAYER, **fields) -> Op:
    amount = {"n_seqs": 8, "n_new": 1, "n_ctx": 99} | fields
    return Op(Kind.FORWARD, 0, 1, 1, scope=scope, **amount)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Kind.LOAD_KV, "h2d"),
        (Kind.STORE_KV, "d2h"),
        (Kind.READ_KV, "disk_read"),
        (Kind.WRITE_KV, "disk_write"),
        (Kind.HOST_COPY, "host_copy"),
    ],
)
def test_link_of_a_transfer(kind, name):
    link = getattr(SMALL, name)
    op = Op(kind, 0, 1, n_seqs=8, stop=100, reads=(PINNED,))
    nbytes = 800 * 2 * OPT.d_model * 2 * (0 if kind in (Kind.READ_KV, Kind.WRITE_KV) else 1)
    assert costs().nbytes(op) == nbytes
    expected = link.latency_s + nbytes / link.bytes_per_s if nbytes else 0.0
    assert costs().seconds(op) == pytest.approx(expected, rel=1e-12)
    assert costs().flops(op) == 0.0


def test_a_pageable_end_takes_the_pageable_link():
    for kind, link in ((Kind.LOAD_KV, SMALL.h2d_pageable), (Kind.STORE_KV, SMALL.d2h_pageable)):
        for slots in ({"reads": (PAGEABLE,)}, {"writes": (PAGEABLE,)}):
            op = Op(kind, 0, 1, n_seqs=1, stop=1, **slots)
            assert costs().seconds(op) == pytest.approx(link.seconds(2 * OPT.d_model * 2))
    # The same amounts over the pinned link: the cache must tell them apart.
    one = costs()
    pageable = Op(Kind.LOAD_KV, 0, 1, n_seqs=1, stop=1, reads=(PAGEABLE,))
    pinned = replace(pageable, reads=(PINNED,))
    assert one.seconds(pageable) != one.seconds(pinned)
    assert one.seconds(pageable) == costs().seconds(pageable)


def test_fence_costs_a_synchronisation():
    assert costs().seconds(Op(Kind.FENCE, 0, 0)) == SMALL.sync_s


def test_gemm_is_floored_by_reading_the_weights():
    elems = 2 * OPT.d_model * OPT.d_ffn
    for rows, memory_bound in ((1, True), (1000, False)):
        op = forward(Scope.MLP, n_seqs=rows)
        gemm_s = max(2 * rows * elems / 1e13, 2 * elems / SMALL.hbm_bytes_per_s)
        assert (2 * rows * elems / 1e13 < 2 * elems / SMALL.hbm_bytes_per_s) == memory_bound
        elementwise = rows * 5 * OPT.d_model * 2 / SMALL.hbm_bytes_per_s
        assert costs().seconds(op) == pytest.approx(gemm_s + elementwise, rel=1e-12)


def test_decode_attention_reads_the_cache_once():
    layer, mlp = (costs().seconds(forward(s)) for s in (Scope.ATTENTION, Scope.MLP))
    longer = costs().seconds(forward(Scope.ATTENTION, n_ctx=199))
    token = 2 * OPT.d_model * 2
    assert longer - layer == pytest.approx(8 * 100 * token / 5e11, rel=1e-9)
    assert costs().seconds(forward(Scope.LAYER)) == pytest.approx(layer + mlp, rel=1e-12)


def test_prefill_and_recompute_attention():
    prefill = forward(Scope.ATTENTION, n_new=100, n_ctx=0)
    recompute = forward(Scope.ATTENTION, n_recompute=99)
    none = forward(Scope.QKV, n_new=100, n_ctx=0), forward(Scope.OUTPUT, n_new=100, n_ctx=0)
    rest = sum(costs().seconds(op) for op in none)
    flops = 8 * 100 * 101 / 2 * 4 * OPT.d_model
    assert costs().seconds(prefill) == pytest.approx(rest + flops / 2e13, rel=1e-9)
    # Everything recomputed is as much work, but by the kernel of decode.
    whole = costs().hardware.attention_window(100, 100)
    assert costs().seconds(recompute) == pytest.approx(rest + flops / whole, rel=1e-9)
    window = forward(Scope.ATTENTION, n_recompute=9)
    pairs = sum(range(91, 101))
    rows = forward(Scope.QKV, n_new=10, n_ctx=90), forward(Scope.OUTPUT, n_new=10, n_ctx=90)
    expected = sum(costs().seconds(op) for op in rows) + 8 * pairs * 4 * OPT.d_model / 4e12
    assert costs().seconds(window) == pytest.approx(expected, rel=1e-9)


def test_projection_is_a_norm_and_a_gemm():
    plain, projecting = forward(n_ctx=99), forward(n_ctx=99, n_project=40)
    rows, d = 8 * 40, OPT.d_model
    norm_s = 2 * rows * d * 2 / SMALL.hbm_bytes_per_s
    gemm_s = 2 * rows * 2 * d * d / 1e13
    more_s = costs().seconds(projecting) - costs().seconds(plain)
    assert more_s == pytest.approx(norm_s + gemm_s, rel=1e-9)
    assert costs().flops(projecting) - costs().flops(plain) == 2 * rows * 2 * d * d
    rotary = costs(replace(OPT, learned_positions=0))
    turned_s = rotary.seconds(projecting) - rotary.seconds(plain) - more_s
    assert turned_s == pytest.approx(6 * rows * d * 2 / SMALL.hbm_bytes_per_s, rel=1e-6)


def test_a_front_attends_to_itself_alone():
    plain, front = forward(Scope.ATTENTION), forward(Scope.ATTENTION, n_front=30)
    more = costs().flops(front) - costs().flops(plain)
    linear = 2 * 8 * 30 * 4 * OPT.d_model**2
    assert more == linear + 8 * (30 * 31 / 2) * 4 * OPT.d_model


def test_rotary_positions_and_gates_cost_passes():
    gated = replace(OPT, gated_ffn=True)
    rotary = replace(OPT, learned_positions=0)
    rows = 8 * 4000

    def seconds(model, scope):
        return costs(model).seconds(forward(scope, n_new=4000, n_ctx=0))

    turned_s = seconds(rotary, Scope.QKV) - seconds(OPT, Scope.QKV)
    passes = 6 * 2 * OPT.n_heads * OPT.head_dim
    assert turned_s == pytest.approx(rows * passes * 2 / SMALL.hbm_bytes_per_s, rel=1e-6)
    gemms_s = 3 * seconds(OPT, Scope.MLP) / 2  # three matrices for two, and as many passes
    d, f = OPT.d_model, OPT.d_ffn
    passes = 5 * d + 5 * f - 1.5 * 5 * d
    expected = gemms_s + rows * passes * 2 / SMALL.hbm_bytes_per_s
    assert seconds(gated, Scope.MLP) == pytest.approx(expected, rel=1e-6)
    # Without biases the GEMM adds the residual, it reads the old values; but no activation.
    saved_s = seconds(OPT, Scope.MLP) - seconds(replace(OPT, linear_bias=False), Scope.MLP)
    assert saved_s == pytest.approx(2 * rows * (d - f) * 2 / SMALL.hbm_bytes_per_s, rel=1e-6)


@pytest.mark.parametrize(("name", "norm_bias"), [("layer_norm", True), ("rms_norm", False)])
def test_measured_norms_and_rotations_replace_memory_bandwidth(name, norm_bias):
    spec, rows = replace(OPT, learned_positions=0, norm_bias=norm_bias), 8 * 100
    op = forward(Scope.QKV, n_new=100, n_ctx=0)
    normed, turned = 2 * rows * OPT.d_model * 2, 6 * rows * OPT.d_model * 2
    fast = costs(spec).seconds(op)
    slow = replace(FLAT, **{name: Curve((1, normed), (1e6, 2e11))}, rotary=Curve((1,), (1e11,)))
    more_s = costs(spec, slow).seconds(op) - fast
    memory_s = (normed + 2 * turned) / SMALL.hbm_bytes_per_s
    assert more_s == pytest.approx(normed / 2e11 + 2 * turned / 1e11 - memory_s, rel=1e-9)
    other = costs(replace(spec, norm_bias=not norm_bias), slow).seconds(op) - fast
    expected = (2 * turned) * (1 / 1e11 - 1 / SMALL.hbm_bytes_per_s)
    assert other == pytest.approx(expected, rel=1e-9)
    beyond = costs(spec, slow)
    beyond.seconds(forward(Scope.QKV, n_new=101, n_ctx=0))
    assert beyond.extrapolated >= {name, "rotary"}


def test_unfused_attention_is_memory_traffic():
    fused = forward(Scope.ATTENTION, n_ctx=4095)
    unfused = replace(fused, attention=Attention.UNFUSED)
    kv = 8 * 4096 * 2 * OPT.d_model * 2
    scores = 8 * OPT.n_heads * 4096 * 2
    extra = (3 * kv + 6 * scores) / SMALL.hbm_bytes_per_s - kv / 5e11
    found = costs().seconds(unfused) - costs().seconds(fused)
    assert found == pytest.approx(extra, rel=1e-9)
    assert costs().flops(unfused) == costs().flops(fused)


def test_unfused_attention_by_its_measured_rates():
    """The first query pays for the cache, each further one for its scores."""
    measured = replace(
        FLAT,
        attention_unfused_decode=Curve((1, 4096), (1e11, 1e11)),
        attention_unfused_scores=Curve((1, 4096), (2e10, 2e10)),
    )

    def attention_s(hardware, **amounts):
        part = forward(Scope.ATTENTION, attention=Attention.UNFUSED, **amounts)
        rows = {"n_new": part.n_new + part.n_recompute, "n_ctx": 0}
        rest = [forward(s, **rows) for s in (Scope.QKV, Scope.OUTPUT)]
        return costs(OPT, hardware).seconds(part) - sum(costs().seconds(op) for op in rest)

    one_s = 8 * 100 * 2 * OPT.d_model * 2 / 1e11
    score_s = 8 * OPT.n_heads * 100 / 2e10
    assert attention_s(measured) == pytest.approx(one_s, rel=1e-9)
    all_s = one_s + 99 * score_s
    assert attention_s(measured, n_new=100, n_ctx=0) == pytest.approx(all_s, rel=1e-9)
    window_s = one_s + 49 * score_s
    assert attention_s(measured, n_recompute=49) == pytest.approx(window_s, rel=1e-9)
    fused = forward(Scope.ATTENTION)
    assert costs(OPT, measured).seconds(fused) == costs().seconds(fused)
    beyond = costs(OPT, measured)
    beyond.seconds(forward(Scope.ATTENTION, attention=Attention.UNFUSED, n_ctx=5000))
    assert beyond.extrapolated == {"attention_unfused"}


def test_launches_bound_small_forwards():
    slow = replace(FLAT, launch_s=1e-3)
    op = forward(Scope.MLP, n_seqs=1)
    assert costs(hardware=slow).seconds(op) == pytest.approx(5e-3)
    unfused = forward(Scope.ATTENTION, n_seqs=1, attention=Attention.UNFUSED)
    assert costs(hardware=slow).seconds(unfused) == pytest.approx(14e-3)


def test_moe_reads_the_experts_that_its_tokens_touch():
    few, many = (costs(MOE).seconds(forward(Scope.MLP, n_seqs=n)) for n in (1, 16))
    expert = 3 * MOE.d_model * MOE.d_expert * 2
    touched = MOE.experts_touched(1, 1), MOE.experts_touched(1, 16)
    assert touched[0] == pytest.approx(2.0)
    grown = (touched[1] - touched[0]) * expert / SMALL.hbm_bytes_per_s
    assert many - few == pytest.approx(grown, rel=0.05)  # activations grow, too
    assert costs(MOE).seconds(replace(forward(Scope.MLP), layer=0)) != few


def test_mla_decode_is_bounded_by_compute():
    slow = replace(FLAT, attention_window=Grid((1,), (1,), ((1e9,),)))
    assert costs(MLA, slow).seconds(forward()) > 10 * costs(MLA).seconds(forward())
    assert costs(OPT, slow).seconds(forward()) == costs(OPT).seconds(forward())


def test_cpu_attention_by_its_own_rate():
    op = Op(Kind.CPU_ATTEND, 0, 1, 1, n_seqs=8, stop=99, n_new=1, n_ctx=99)
    nbytes = 8 * 99 * 2 * OPT.d_model * 2
    assert costs().seconds(op) == pytest.approx(nbytes / SMALL.cpu_attention_bytes_per_s)
    assert costs().flops(op) == 8 * 100 * 4 * OPT.d_model


def test_extrapolation_is_flagged():
    inside, outside = costs(hardware=SMALL), costs(hardware=SMALL)
    inside.seconds(forward(n_ctx=1000))
    outside.seconds(forward(n_ctx=5000))
    outside.seconds(forward(n_new=3000, n_ctx=0))
    assert inside.extrapolated == set()
    assert outside.extrapolated == {"attention_decode", "gemm"}


def test_no_link_for_compute():
    with pytest.raises(ValueError, match="forward crosses no link"):
        costs().link(forward())
