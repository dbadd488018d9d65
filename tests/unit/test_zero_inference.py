"""ZeRO-Inference: one big batch, weights ahead of use, KV on the GPU or attended on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.accelerate import Accelerate
from policies.errors import OutOfMemory
from policies.plan.memory import check_run
from policies.plan.op import Kind
from policies.spec.workload import Batch, Block
from policies.trace.metrics import metrics
from policies.zero_inference import ZeroInference
from sim.engine import SimBackend
from tests.policies_table import OPT, RAGGED, SMALL, Scenario, case, one_block, planned

DEEP = Scenario(replace(OPT, n_layers=12), one_block(max_new=4), SMALL)
ON_LINK = (Kind.LOAD_KV, Kind.STORE_KV)


def decode_s(plan) -> float:
    return metrics(SimBackend(plan.costs).run(plan.ops)).decode_s


def test_batches_are_merged_or_left():
    merged = ZeroInference().blocks(RAGGED)
    assert [block.batches for block in merged] == [(Batch(37, 260),), (Batch(18, 400),)]
    assert [block.index for block in merged] == [0, 1]
    assert ZeroInference(batches="given").blocks(RAGGED) == RAGGED


def test_nothing_is_synchronised_and_kv_never_moves():
    plan = case("zero-inference", "opt")
    kinds = [op.kind for op in plan.ops]
    assert kinds.count(Kind.FENCE) == 1  # that between blocks
    assert not {*ON_LINK, Kind.CPU_ATTEND} & set(kinds)


def test_weights_arrive_while_the_layer_before_computes():
    """A decode step takes as long as its weights; Accelerate takes the sum of both."""
    plan = planned(ZeroInference(), DEEP)
    step_s = decode_s(plan) / 3
    weights_s = 12 * DEEP.hardware.h2d.seconds(OPT.layer_bytes(0))
    # Two slots: the first two layers of 3 x 12 arrive before decode begins.
    assert (1 - 2 / 36) * weights_s <= step_s <= 1.02 * weights_s
    assert step_s < decode_s(planned(Accelerate(batches="big", pinned=True), DEEP)) / 3


def test_on_the_cpu_only_queries_and_outputs_move():
    for batches in ("big", "given"):
        plan = planned(ZeroInference(kv="cpu", batches=batches), DEEP)
        decode = [op for op in plan.ops if op.step > 0]
        assert not [op for op in decode if op.kind is Kind.LOAD_KV]
        attended = [op for op in decode if op.kind is Kind.CPU_ATTEND]
        assert len(attended) == 3 * 12 * len(plan.blocks[0].batches)
        assert {op.n_seqs for op in attended} == ({96} if batches == "big" else {32})


def test_several_batches_keep_the_cpu_busier_than_one():
    """One batch's CPU waits while the GPU projects; its own layers follow one another."""
    slow = replace(SMALL, cpu_attention_bytes_per_s=2e9, launch_s=1e-4)
    one, many = (
        decode_s(planned(ZeroInference(kv="cpu", batches=batches), replace(DEEP, hardware=slow)))
        for batches in ("big", "given")
    )
    assert many < one


def test_kv_decides_what_the_gpu_must_hold():
    blocks = (Block(0, (Batch(64, 2000),) * 4, 8),)
    machine = replace(SMALL, gpu_bytes=20e9, host_bytes=256e9)
    for kv in ("gpu", "cpu"):
        policy = ZeroInference(kv=kv, batches="given")
        placement = policy.place(replace(OPT, n_layers=8), machine, blocks)
        args = (replace(OPT, n_layers=8), machine, placement, policy.buffers, blocks)
        if kv == "gpu":
            with pytest.raises(OutOfMemory, match="resident KV"):
                check_run(*args)
        else:
            check_run(*args)


@pytest.mark.parametrize(
    ("field", "value"), [("kv", "host"), ("batches", "seq"), ("attention", "cpu")]
)
def test_wrong_settings_are_named(field, value):
    with pytest.raises(ValueError, match=rf"policy\.{field}: '{value}' is neither"):
        ZeroInference(**{field: value})
