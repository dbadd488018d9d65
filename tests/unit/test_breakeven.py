from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from policies.cost.balance import n_recompute_closed_form
from policies.cost.breakeven import BreakEven, PhaseCost, break_even, phase_cost
from policies.cost.flops import gemm_flops
from policies.cost.model import CostModel
from policies.placement import ON_GPU, ON_HOST, Placement, Shares
from policies.plan.op import Attention, Scope
from policies.spec.curve import Curve
from policies.spec.hardware import HardwareProfile, Link
from policies.spec.hardware_build import hardware_from_mapping
from policies.spec.model import ModelSpec
from policies.spec.workload import Batch, Block

CONF = Path(__file__).parents[2] / "conf"
RTX3090 = hardware_from_mapping(yaml.safe_load((CONF / "hardware/rtx3090.yaml").read_text()))


def model(name: str, **changes) -> ModelSpec:
    return ModelSpec(**yaml.safe_load((CONF / f"model/{name}.yaml").read_text()) | changes)


def placed(spec: ModelSpec, weights: Shares, kv: Shares) -> Placement:
    return Placement(((weights, weights),) * spec.n_layers, (kv,))


OPT = model("opt-30b", n_layers=4)
BLOCK = Block(0, (Batch(8, 512),) * 4, 32)


def found(
    spec: ModelSpec = OPT,
    hardware: HardwareProfile = RTX3090,
    block: Block = BLOCK,
    weights: Shares = ON_HOST,
    kv: Shares = ON_HOST,
    attention: Attention = Attention.FUSED,
    on_cpu: tuple[int, ...] = (),
) -> BreakEven:
    return break_even(spec, hardware, placed(spec, weights, kv), block, attention, on_cpu)


def test_transfers_are_bytes_over_rate_plus_a_latency_a_copy():
    decode = found().decode
    link, n_ctx = RTX3090.h2d, 512 + 16 - 1
    weights = sum(OPT.layer_bytes(i) for i in range(4))
    kv = 4 * 8 * n_ctx * OPT.kv_bytes_per_token
    assert decode.weights_s == pytest.approx(weights / link.bytes_per_s + 4 * link.latency_s)
    assert decode.kv_s == pytest.approx(kv / link.bytes_per_s + 4 * 4 * link.latency_s)
    stored = 4 * 8 * OPT.kv_bytes_per_token / RTX3090.d2h.bytes_per_s
    assert decode.store_s == pytest.approx(stored + 4 * 4 * RTX3090.d2h.latency_s)
    assert decode.disk_s == 0.0


def test_prefill_loads_no_kv_and_stores_the_prompt():
    prefill = found().prefill
    stored = 4 * 8 * 512 * OPT.kv_bytes_per_token / RTX3090.d2h.bytes_per_s
    assert prefill.kv_s == 0.0
    assert prefill.store_s == pytest.approx(stored + 16 * RTX3090.d2h.latency_s)


@pytest.mark.parametrize(
    ("cost", "bound", "bound_s"),
    [
        (PhaseCost(3, 2, 1, 1, 4), "weights", 5),
        (PhaseCost(2, 3, 1, 1, 4), "kv", 5),
        (PhaseCost(1, 1, 1, 3, 2), "disk", 3),
        (PhaseCost(1, 1, 5, 3, 2), "kv", 5),
        (PhaseCost(1, 1, 1, 1, 9), "compute", 9),
        (PhaseCost(1, 0, 1, 1, 2, 7), "cpu", 7),
    ],
)
def test_the_busiest_resource_bounds_a_phase(cost, bound, bound_s):
    assert (cost.bound, cost.bound_s) == (bound, bound_s)
    total = sum((cost.weights_s, cost.kv_s, cost.store_s, cost.disk_s, cost.compute_s, cost.cpu_s))
    assert cost.overlap_gain == total / bound_s


def test_what_lies_on_disk_is_read_from_disk():
    share = Shares(0.0, 0.5, 0.5)
    decode = found(weights=share, kv=share).decode
    assert decode.bound == "disk"
    half = sum(OPT.layer_bytes(i) for i in range(4)) / 2
    half += 4 * 8 * 527 * OPT.kv_bytes_per_token / 2
    assert decode.disk_s > half / RTX3090.disk_read.bytes_per_s


def test_the_scan_finds_the_best_recompute_of_all():
    block = Block(0, (Batch(8, 200), Batch(4, 150)), 32)
    best = found(block=block)
    placement = placed(OPT, ON_HOST, ON_HOST)
    costs = CostModel(OPT, RTX3090, placement)
    bounds = [phase_cost(costs, block, 16, Attention.FUSED, n).bound_s for n in range(216)]
    assert best.recompute_gain == pytest.approx(bounds[0] / min(bounds), rel=1e-3)
    assert best.recompute_gain == pytest.approx(bounds[0] / bounds[best.n_recompute])
    assert best.recompute_gain > 1.0


def constant_rates() -> HardwareProfile:
    """No latency, no launch, no HBM floor, attention for free: the closed form's conditions."""
    flat, free = Curve((1.0,), (40e12,)), Curve((1.0,), (1e30,))
    window = replace(RTX3090.attention_window, z=tuple((1e30,) * 3 for _ in range(3)))
    link = Link(0.0, 24e9)
    return replace(
        RTX3090,
        h2d=link,
        d2h=link,
        launch_s=0.0,
        hbm_bytes_per_s=1e30,
        gemm=flat,
        attention_decode=free,
        attention_prefill=free,
        attention_window=window,
    )


def test_the_scan_equals_the_closed_form_under_its_conditions():
    spec, hardware = replace(OPT, vocab=1), constant_rates()
    best = found(spec, hardware, weights=ON_GPU)
    kappa_crit = gemm_flops(spec, 0, Scope.LAYER, 1) / spec.kv_bytes_per_token_layer * 24e9 / 40e12
    expected = n_recompute_closed_form(527, 1, kappa_crit)
    assert 1 < expected < 500
    assert best.n_recompute_closed == pytest.approx(expected)
    assert abs(best.n_recompute - expected) <= 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"weights": ON_HOST},
        {"kv": Shares(0.5, 0.5, 0.0)},
        {"block": Block(0, (Batch(8, 512), Batch(8, 511)), 32)},
    ],
)
def test_outside_its_conditions_there_is_no_closed_form(change):
    assert found(OPT, constant_rates(), **{"weights": ON_GPU, **change}).n_recompute_closed is None


def test_recompute_gains_nothing_where_compute_bounds():
    slow = replace(RTX3090, launch_s=1.0)
    best = found(hardware=slow)
    assert best.decode.bound == "compute"
    assert (best.n_recompute, best.recompute_gain) == (0, 1.0)
    assert best.load_everything


def test_everything_fits_exactly_from_the_byte_on_that_it_needs():
    need = found().resident_bytes
    weights = OPT.weight_bytes + 4 * 8 * (512 + 31) * OPT.kv_bytes_per_token
    assert need > weights
    for spare, fits in ((0, True), (-1, False)):
        hardware = replace(RTX3090, gpu_bytes=need + RTX3090.gpu_reserve_bytes + spare)
        assert found(hardware=hardware).fits_on_gpu is fits


@pytest.mark.parametrize("name", ["opt-30b", "mixtral-8x7b"])
def test_the_cpu_is_the_rival_below_a_number_of_sequences(name):
    spec = model(name, n_layers=4)
    best = found(spec, block=Block(0, (Batch(1, 512),), 32))
    assert best.cpu_wins
    n = best.offload_wins_seqs
    for n_seqs, wins in ((n - 1, True), (n, False)):
        at = found(spec, block=Block(0, (Batch(n_seqs, 512),), 32))
        link_s = at.decode.h2d_s - 8 * RTX3090.h2d.latency_s
        assert (at.cpu_step_s < link_s) is wins
        assert at.offload_wins_seqs == n


def test_a_fast_link_beats_the_cpu_at_every_size():
    fast = replace(RTX3090, h2d=Link(0.0, 1e12))
    best = found(hardware=fast)
    assert not best.cpu_wins
    assert best.offload_wins_seqs == 1


def test_the_cpu_is_no_rival_where_something_is_not_on_the_host():
    assert found(weights=ON_GPU).cpu_step_s is None
    assert found(kv=Shares(0.0, 0.5, 0.5)).cpu_step_s is None


def test_attention_on_the_cpu_loads_no_kv():
    best = found(attention=Attention.CPU, on_cpu=(1, 1, 1, 1))
    assert best.decode.kv_s == 0.0
    kv = 4 * 8 * 527 * OPT.kv_bytes_per_token
    assert best.decode.cpu_s == pytest.approx(kv / RTX3090.cpu_attention_bytes_per_s, rel=1e-6)
    assert best.recompute_gain == 1.0
    with pytest.raises(ValueError, match=r"on_cpu: \(0, 0, 0, 0\) must be 1 for every batch"):
        found(attention=Attention.CPU)


def test_a_block_of_one_token_has_no_decode():
    best = found(block=Block(0, (Batch(2, 64),), 1))
    assert best.decode is None
    assert (best.n_ctx, best.recompute_gain, best.cpu_wins) == (0, 1.0, False)
