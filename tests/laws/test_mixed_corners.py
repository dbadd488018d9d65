"""Mixed against its corners: its predicted decode steps are never more than 1 % longer than theirs.

Corners under the same placement: ``flexgen-pinned``, ``tightllm``, ``kvpr``, ``hybridserve``. Steps
are predicted by the max-plus recurrence of the whole plan and summed from the end of prefill. Jobs
of fewer than 4 layers or 2 decode steps are left out: between fences more is fetched ahead while
a longer prefill still runs, which a sum of decode steps counts as gained.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from policies.cost.model import CostModel
from policies.drive import Policy, drive
from policies.errors import OutOfMemory
from policies.flexgen import FlexGen
from policies.hybridserve import HybridServe
from policies.kvpr import Kvpr
from policies.mixed import Mixed
from policies.plan.link import link
from policies.plan.memory import check_run
from policies.plan.op import Kind
from policies.plan.predict import predict
from policies.spec.curve import Curve, Grid
from policies.spec.hardware import HardwareProfile, Link
from policies.spec.model import ModelSpec
from policies.spec.workload import Batch, Block
from policies.tightllm import TightLLM
from tests.policies_table import GQA, OPT, SMALL

CORNERS: tuple[Policy, ...] = (
    FlexGen(kv_pinned=True),
    TightLLM(solver="dp"),
    Kvpr(),
    HybridServe(),
)
HEAD_DIM = 128


def decode_s(
    policy: Policy, model: ModelSpec, hardware: HardwareProfile, block: Block
) -> tuple[float, tuple[int, ...]]:
    """Seconds from the end of prefill to the end, and the tokens kept as layer inputs."""
    blocks = policy.blocks((block,))
    placement = policy.place(model, hardware, blocks)
    check_run(model, hardware, placement, policy.buffers, blocks)
    costs = CostModel(model, hardware, placement)
    ops = list(drive(policy, blocks, costs))
    ends: dict[int, float] = {}
    for op, (_, end_s) in zip(ops, predict(link(ops), costs.seconds), strict=True):
        if op.kind is Kind.FORWARD:
            ends[op.step] = end_s
    return ends[max(ends)] - ends[0], placement.inputs[0] if placement.inputs else ()


@st.composite
def models(draw) -> ModelSpec:
    heads = draw(st.sampled_from([8, 16, 32, 56]))
    shared = draw(st.sampled_from([1, 1, 4, 8]))
    base = OPT if shared == 1 and draw(st.booleans()) else GQA
    width = heads * HEAD_DIM
    return replace(
        base,
        n_layers=draw(st.sampled_from([4, 8, 12])),
        d_model=width,
        n_heads=heads,
        n_kv_heads=max(1, heads // shared),
        d_ffn=4 * width,
    )


@st.composite
def machines(draw) -> HardwareProfile:
    faster, wider = draw(st.floats(0.3, 16.0)), draw(st.floats(0.3, 10.0))
    window = SMALL.attention_window
    return replace(
        SMALL,
        gpu_bytes=200e9,
        host_bytes=draw(st.sampled_from([20e9, 60e9, 2e12])),
        gemm=Curve(SMALL.gemm.x, tuple(y * faster for y in SMALL.gemm.y)),
        attention_window=Grid(
            window.x, window.y, tuple(tuple(z * faster for z in row) for row in window.z)
        ),
        h2d=Link(1e-5, 12e9 * wider),
        d2h=Link(1e-5, 11e9 * wider),
        hbm_bytes_per_s=SMALL.hbm_bytes_per_s * faster,
        launch_s=draw(st.sampled_from([2e-6, 1e-5])),
    )


@st.composite
def jobs(draw) -> Block:
    n_seqs, longest = draw(st.sampled_from([1, 4, 16, 32])), draw(st.integers(16, 2500))
    prompts = draw(st.lists(st.floats(0.3, 1.0), min_size=1, max_size=5))
    batches = tuple(Batch(n_seqs, max(1, round(longest * share))) for share in prompts)
    return Block(0, batches, draw(st.sampled_from([3, 5, 8])))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(model=models(), hardware=machines(), block=jobs())
def test_mixed_is_never_slower_than_its_corners(model, hardware, block):
    try:
        mixed_s, _ = decode_s(Mixed(solver="dp"), model, hardware, block)
    except OutOfMemory:
        assume(False)
    for corner in CORNERS:
        try:
            corner_s, _ = decode_s(corner, model, hardware, block)
        except OutOfMemory:
            continue
        assert mixed_s <= 1.01 * corner_s, corner.name


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_inputs_of_grouped_query_attention_are_never_kept(kv_heads):
    """They are several times the KV: the program is left with load and recompute by itself."""
    model = replace(GQA, n_layers=4, n_kv_heads=kv_heads)
    _, inputs = decode_s(Mixed(solver="dp"), model, SMALL, Block(0, (Batch(16, 900),) * 3, 8))
    assert inputs == (0, 0, 0)


def test_inputs_spare_the_host_where_kv_would_go_to_disk():
    model = replace(OPT, n_layers=4)
    block = Block(0, (Batch(32, 1000),) * 3, 8)
    plenty = replace(SMALL, gpu_bytes=64e9)
    policy = Mixed(solver="dp")
    whole = policy.place(model, plenty, (block,))
    homes = whole.home_bytes(model, replace(block))
    weights = whole.total_weight_bytes(model, "host")
    kv_only = TightLLM().place(model, plenty, (block,)).home_bytes(model, block)[0]
    tight = replace(plenty, host_bytes=weights + 0.6 * kv_only)
    placed = policy.place(model, tight, (block,))
    assert TightLLM().place(model, tight, (block,)).kv[0].disk > 0.3
    assert placed.kv[0].disk == 0.0
    assert sum(placed.home_bytes(model, block)) <= 0.6 * kv_only
    assert sum(homes) <= kv_only
