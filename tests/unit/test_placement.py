"""Where weights and KV live: shares, overflow order, FlexGen's effective percentages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.placement import (
    ON_GPU,
    ON_HOST,
    Placement,
    Shares,
    block_kv_bytes,
    flexgen_placement,
    host_placement,
)
from policies.plan.op import Scope
from policies.spec.workload import Batch, Block
from tests.policies_table import GQA, MLA, MOE, OPT, SMALL

BLOCKS = [Block(0, (Batch(8, 100), Batch(4, 50)), 5), Block(1, (Batch(8, 10),), 1)]


def test_shares_must_sum_to_one():
    assert Shares(0.25, 0.5, 0.25).streamed == 0.75
    with pytest.raises(ValueError, match="must sum to 1"):
        Shares(0.5, 0.4, 0.0)
    with pytest.raises(ValueError, match=r"share host: 1\.5 must be in \[0, 1\]"):
        Shares(0.0, 1.5, -0.5)


def test_activations_are_never_on_disk():
    with pytest.raises(ValueError, match="must not use the disk"):
        Placement(((ON_HOST, ON_HOST),), (ON_HOST,), Shares(0.0, 0.0, 1.0))


def test_kv_of_a_block_at_its_longest():
    """Prompt and every generated token but the last, K and V, 16 bit, all layers."""
    tokens = 8 * (100 + 4) + 4 * (50 + 4)
    assert block_kv_bytes(OPT, BLOCKS[0]) == tokens * OPT.n_layers * 2 * OPT.d_model * 2
    assert block_kv_bytes(OPT, BLOCKS[1]) == 8 * 10 * OPT.n_layers * 2 * OPT.d_model * 2


@pytest.mark.parametrize("model", [OPT, GQA, MOE, MLA], ids=lambda m: m.name)
def test_every_weight_has_one_home(model):
    for placement in (
        host_placement(model, SMALL, BLOCKS, resident_layers=1),
        flexgen_placement(model, BLOCKS, (20, 50, 0, 100, 100, 0)),
    ):
        for layer in range(model.n_layers):
            for scope in (Scope.ATTENTION, Scope.MLP, Scope.LAYER):
                held = [
                    placement.weight_bytes(model, layer, scope, t) for t in ("gpu", "host", "disk")
                ]
                assert abs(sum(held) - model.layer_bytes(layer, scope)) <= 2
                assert placement.streamed_bytes(model, layer, scope) == held[1] + held[2]


def test_kv_overflows_before_weights():
    weights = sum(OPT.layer_bytes(i) for i in range(OPT.n_layers))
    kv = block_kv_bytes(OPT, BLOCKS[0])
    half_kv = replace(SMALL, host_bytes=weights + kv / 2)
    placement = host_placement(OPT, half_kv, BLOCKS)
    assert placement.weights[0] == (ON_HOST, ON_HOST)
    assert placement.kv[0].disk == pytest.approx(0.5)
    assert placement.kv[1] == ON_HOST  # a smaller block fits
    half_weights = replace(SMALL, host_bytes=weights / 2)
    placement = host_placement(OPT, half_weights, BLOCKS)
    assert placement.kv[0].disk == pytest.approx(1.0)
    assert placement.total_weight_bytes(OPT, "disk") == pytest.approx(weights / 2, abs=2)
    kept = host_placement(OPT, half_weights, BLOCKS, kv_on_gpu=True)
    assert kept.kv[0] == ON_GPU
    less = host_placement(OPT, half_kv, BLOCKS, host_buffer_bytes=round(kv / 4))
    assert less.kv[0].disk == pytest.approx(0.75)


def test_host_that_weights_fill_to_the_byte():
    """The remainder for KV is a rounding error, not a negative share."""
    model = replace(OPT, n_layers=24)
    for extra in range(40):
        hardware = replace(SMALL, host_bytes=1e9 + extra * 12345.6)
        assert host_placement(model, hardware, BLOCKS).kv[0].disk == pytest.approx(1.0)


def test_nominal_and_effective_percentages():
    """OPT at 20/80: of attention's four equal matrices only the last has its midpoint above 80 %;
    of the MLP's two none has. A quarter of a third is 8.3 %, not 20."""
    placement = flexgen_placement(OPT, BLOCKS, (20, 80, 0, 100, 100, 0))
    on_gpu = placement.total_weight_bytes(OPT, "gpu")
    total = sum(OPT.layer_bytes(i) for i in range(OPT.n_layers))
    assert on_gpu / total == pytest.approx(0.083, abs=0.001)
    attention, mlp = placement.weights[0]
    assert (attention.gpu, mlp.gpu) == (pytest.approx(0.25, abs=0.001), 0.0)
    everything = flexgen_placement(OPT, BLOCKS, (100, 0, 100, 0, 100, 0))
    assert everything.streamed_bytes(OPT, 0, Scope.LAYER) == 0
    assert everything.kv == (ON_GPU, ON_GPU)


def test_kv_is_split_by_whole_sequences():
    placement = flexgen_placement(OPT, BLOCKS, (0, 100, 30, 50, 100, 0))
    assert placement.kv[0] == Shares(2 / 8, 4 / 8, 2 / 8)


@pytest.mark.parametrize(
    ("percent", "message"),
    [
        ((0, 100, 0, 100), "must have six numbers"),
        ((60, 60, 0, 100, 0, 100), "sum to <= 100"),
        ((-1, 60, 0, 100, 0, 100), "sum to <= 100"),
    ],
)
def test_bad_percent(percent, message):
    with pytest.raises(ValueError, match=rf"policy\.percent.*{message}"):
        flexgen_placement(OPT, BLOCKS, percent)
