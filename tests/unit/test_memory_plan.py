"""Pools of a run by hand, and a placement that leaves room for its own staging."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.errors import OutOfMemory
from policies.placement import ON_GPU, host_placement
from policies.plan.memory import (
    Buffers,
    Pool,
    block_pools,
    check_fits,
    check_run,
    place,
    run_pools,
    workspace_bytes,
)
from policies.plan.op import Attention, Scope, Tier
from policies.spec.workload import Batch, Block
from tests.policies_table import OPT, SMALL

BLOCK = Block(0, (Batch(8, 100), Batch(4, 50)), 5)


def held(pools, tier):
    return {pool.name: pool.nbytes for pool in pools if pool.tier is tier}


def test_pools_by_hand():
    placement = host_placement(OPT, SMALL, [BLOCK])
    layer, token = OPT.layer_bytes(0), 2 * OPT.d_model * 2
    run = run_pools(OPT, placement, Buffers(relay_bytes=7))
    assert held(run, Tier.GPU) == {
        "embeddings and head": OPT.edge_bytes,
        "weight slots": 2 * layer,
    }
    assert held(run, Tier.HOST) == {"weights": OPT.n_layers * layer, "relay buffers": 7}
    block = block_pools(OPT, placement, Buffers(), BLOCK)
    gpu = held(block, Tier.GPU)
    assert gpu["block 0: KV load slots"] == 2 * 8 * 104 * token
    assert gpu["block 0: KV store slots"] == 2 * 8 * 104 * token
    assert gpu["block 0: hidden states"] == (8 * 100 + 4 * 50) * OPT.d_model * 2
    tokens = 8 * 104 + 4 * 54
    assert held(block, Tier.HOST) == {"block 0: KV": tokens * OPT.n_layers * token}


def test_sep_layer_slots_are_smaller():
    placement = host_placement(OPT, SMALL, [BLOCK])
    slots = held(run_pools(OPT, placement, Buffers(sep_layer=True)), Tier.GPU)["weight slots"]
    assert slots == 2 * max(OPT.layer_bytes(0, s) for s in (Scope.ATTENTION, Scope.MLP))


def test_workspace_has_scores_only_if_unfused():
    batch = Batch(2, 300)
    fused, unfused = (
        workspace_bytes(OPT, Buffers(attention=a), batch)
        for a in (Attention.FUSED, Attention.UNFUSED)
    )
    # Score input and output, 16 bit, and what attention holds instead of the wider MLP.
    attention = 2 * 300 * (OPT.n_heads * 2 * OPT.head_dim + 2 * OPT.d_model)
    mlp = 2 * 300 * (2 * OPT.d_ffn + 2 * OPT.d_model)
    scores = 2 * 2 * OPT.n_heads * 300 * 300
    assert unfused - fused == 2 * (max(attention + scores, mlp) - mlp)
    short = Batch(2, 10)
    assert workspace_bytes(OPT, Buffers(attention=Attention.UNFUSED), short) > 0


def test_overflow_names_tier_need_have_and_largest():
    pools = [Pool("a", Tier.GPU, 10), Pool("b", Tier.GPU, 20), Pool("c", Tier.HOST, 10**12)]
    with pytest.raises(OutOfMemory) as caught:
        check_fits(pools, replace(SMALL, gpu_bytes=29.0))
    error = caught.value
    assert (error.tier, error.need_bytes, error.have_bytes, error.key) == ("gpu", 30, 29, "b")
    with pytest.raises(OutOfMemory) as caught:
        check_fits(pools, SMALL)
    assert (caught.value.tier, caught.value.key) == ("host", "c")


@pytest.mark.parametrize("share", [0.3, 0.6, 0.75, 0.9, 0.99, 1.0])
def test_what_is_placed_fits(share):
    """Staging for what went to disk is host memory too: the placement leaves room for it."""
    model, block = replace(OPT, n_layers=12), Block(0, (Batch(32, 500),) * 3, 8)
    everything = host_placement(model, SMALL, [block])
    homes = everything.total_weight_bytes(model, "host")
    homes += held(block_pools(model, everything, Buffers(), block), Tier.HOST)["block 0: KV"]
    hardware = replace(SMALL, host_bytes=share * homes)
    placement = place(model, hardware, [block], Buffers())
    check_run(model, hardware, placement, Buffers(), [block])
    assert (placement.kv[0].disk > 0) == (share < 1.0) or share == 1.0
    naive = host_placement(model, hardware, [block])
    if share < 1.0:
        assert placement.kv[0].disk >= naive.kv[0].disk
        with pytest.raises(OutOfMemory, match="host memory"):
            check_run(model, hardware, naive, Buffers(), [block])


def test_auto_fills_the_gpu_with_whole_layers():
    fixed = sum(p.nbytes for p in block_pools(
        OPT, host_placement(OPT, SMALL, [BLOCK]), Buffers(), BLOCK) if p.tier is Tier.GPU
    )  # fmt: skip
    layer = OPT.layer_bytes(0)
    base = OPT.edge_bytes + fixed + 2 * layer
    for spare, resident in ((0, 0), (1, 1), (1.5, 1)):
        hardware = replace(SMALL, gpu_bytes=base + spare * layer)
        placement = place(OPT, hardware, [BLOCK], Buffers(), mode="auto")
        # With all three layers resident the two slots are not needed.
        expected = 3 if spare >= 1 else resident
        assert sum(w == (ON_GPU, ON_GPU) for w in placement.weights) == expected
    with pytest.raises(ValueError, match=r"policy\.placement: 'disk' is none of"):
        place(OPT, SMALL, [BLOCK], Buffers(), mode="disk")


def test_bad_buffers():
    with pytest.raises(ValueError, match=r"buffers\.kv_in_slots: -1 must be >= 0"):
        Buffers(kv_in_slots=-1)
