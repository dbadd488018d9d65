"""FlexGen's linear program: no placement on a grid is better, what it returns runs."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from policies.cost.flexgen_model import SHARES, T4_FITTED, FlexGenJob, flexgen_times
from policies.errors import OutOfMemory
from policies.flexgen import FlexGen
from policies.flexgen_search import PlacementSearch, rates_of
from policies.placement import Placement, Shares, flexgen_placement
from policies.plan.memory import block_pools, check_fits, check_run, run_pools
from policies.spec.workload import Batch, Block
from tests.policies_table import GQA, MLA, MOE, OPT, SMALL

JOB = FlexGenJob(OPT, prompt_len=256, gen_len=8, batch_size=32, n_batches=3)
BLOCK = (Block(0, (Batch(32, 256),) * 3, 8),)
POLICIES = {
    "pageable": FlexGen(),
    "pinned": FlexGen(kv_pinned=True),
    "cpu": FlexGen(attention="cpu"),
}
WEIGHTS = sum(OPT.layer_bytes(i) for i in range(OPT.n_layers))


def machine(gpu: float, host: float):
    """GPU and host of this many times the weights, relays apart."""
    return replace(SMALL, gpu_bytes=gpu * WEIGHTS, host_bytes=host * WEIGHTS + 4 * 2**31)


def fits(hardware, policy: FlexGen, x: np.ndarray) -> bool:
    """Whether continuous shares fit, by the memory plan."""
    w, kv, act = (Shares(*(float(v) for v in x[i : i + 3])) for i in (0, 3, 6))
    placement = Placement(((w, w),) * OPT.n_layers, (kv,), act)
    pools = run_pools(OPT, placement, policy.buffers)
    pools += block_pools(OPT, placement, policy.buffers, BLOCK[0])
    try:
        check_fits(pools, hardware)
    except OutOfMemory:
        return False
    return True


def simplex(parts: int, disk: bool = True):
    steps = range(parts + 1)
    for gpu, host in product(steps, steps):
        rest = parts - gpu - host
        if rest >= 0 and (disk or rest == 0):
            yield gpu / parts, host / parts, rest / parts


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("gpu", "host"), [(3.0, 2.0), (3.0, 1.4), (6.0, 6.0)])
def test_no_placement_on_a_grid_is_better(name, gpu, host):
    policy, hardware = POLICIES[name], machine(gpu, host)
    times = flexgen_times(JOB, rates_of(hardware, JOB, policy))
    grid = [
        times.block_s(np.array([*w, *kv, *act]))
        for w, kv, act in product(simplex(4), simplex(4), simplex(2, disk=False))
        if not (name == "cpu" and kv[0]) and fits(hardware, policy, np.array([*w, *kv, *act]))
    ]
    search = PlacementSearch(hardware, OPT, policy)
    best, found = search.relaxed(JOB), search.best(JOB)
    assert best.block_s <= min(grid) * (1 + 1e-4)  # the tie-break may cost that much
    assert best.block_s == pytest.approx(times.block_s(np.array(best.shares)))
    assert fits(machine(gpu * 1.001, host * 1.001), policy, np.abs(best.shares))
    if host > 1.5:  # else whole tensors leave no way to fit
        assert found.block_s >= best.block_s * (1 - 1e-9)  # room for them costs time


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("model", [OPT, GQA, MOE, MLA], ids=lambda m: m.name)
def test_what_it_returns_runs_as_flexgen_honours_it(name, model):
    policy = POLICIES[name]
    hardware = replace(SMALL, gpu_bytes=1.4e9, host_bytes=4 * 2**31 + 0.4e9)
    found = PlacementSearch(hardware, model, policy).best(replace(JOB, model=model))
    assert found is not None
    placement = flexgen_placement(model, BLOCK, found.percent)
    check_run(model, hardware, placement, policy.buffers, BLOCK)
    gpu, host = found.percent[::2], found.percent[1::2]
    assert all(g >= 0 and h >= 0 and g + h <= 100 for g, h in zip(gpu, host, strict=True))
    assert found.percent[4] + found.percent[5] == pytest.approx(100)  # activations: not on disk
    if name == "cpu":
        assert found.percent[2] == 0


def test_nothing_runs_on_a_machine_without_memory():
    tiny = replace(SMALL, gpu_bytes=1e6)
    assert PlacementSearch(tiny, OPT, FlexGen()).best(JOB) is None
    assert PlacementSearch(tiny, OPT, FlexGen()).over_batches(256, 8) is None


def test_of_placements_as_fast_the_one_without_disk():
    # Attention on the CPU hides every disk read here: without a tie-break either may come out.
    rates = replace(T4_FITTED, disk_read_bytes_per_s=1e15, cpu_attention_flops_per_s=1e9)
    found = PlacementSearch(machine(3.0, 4.0), OPT, FlexGen(attention="cpu"), rates).best(JOB)
    assert found.shares[SHARES.index("w_disk")] == found.shares[SHARES.index("kv_disk")] == 0


def test_more_batches_until_throughput_drops():
    search = PlacementSearch(machine(3.0, 2.0), OPT, FlexGen(kv_pinned=True))
    best = search.over_batches(256, 8, sizes=(1, 8, 32), max_batches=4)
    tried = [
        search.best(FlexGenJob(OPT, 256, 8, size, n)) for size in (1, 8, 32) for n in range(1, 5)
    ]
    assert best.tokens_per_s == max(found.tokens_per_s for found in tried if found)


def test_rates_are_those_of_the_profile():
    pinned, pageable = (rates_of(SMALL, JOB, FlexGen(kv_pinned=p)) for p in (True, False))
    assert pinned.kv_load_bytes_per_s == SMALL.h2d.bytes_per_s
    both = 1 / SMALL.host_copy.bytes_per_s + 1 / SMALL.h2d.bytes_per_s
    assert pageable.kv_load_bytes_per_s == pytest.approx(1 / both)
    assert rates_of(SMALL, JOB, FlexGen(attention="cpu")).kv_load_bytes_per_s is None
    # One key and value of MHA in 16 bits: 4 d FLOPs per 4 d bytes.
    assert pinned.attention_decode_flops_per_s == pytest.approx(SMALL.attention_decode(260))
    with pytest.raises(ValueError, match="h2d_bytes_per_s -1"):
        replace(T4_FITTED, h2d_bytes_per_s=-1.0)
    with pytest.raises(ValueError, match="batch_size 0 must be >= 1"):
        replace(JOB, batch_size=0)


def test_percentages_that_sum_to_a_hundred_leave_nothing_on_disk():
    placement = flexgen_placement(OPT, BLOCK, (100, 0, 0, 100, 99.31, 0.69))
    assert placement.act.disk == 0.0
