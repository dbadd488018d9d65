"""What would help a run that does not fit: settings that shrink what is largest, and no others."""

from dataclasses import replace

import pytest

from policies.accelerate import Accelerate
from policies.errors import OutOfMemory
from policies.flexgen import FlexGen
from policies.placement import Placement, Shares
from policies.plan.memory import Buffers, block_pools, check_run, run_pools
from policies.spec.workload import Batch, Block
from policies.tightllm import TightLLM
from policies.zero_inference import ZeroInference
from sim.remedy import _OF_A_BATCH, _OF_THE_BLOCK, Sizes, _settings, remedy
from tests.policies_table import OPT, SMALL


def helps(policy, n_seqs, prompt_len, n_batches=2, hardware=SMALL, fixed=True, max_new=4):
    """The remedy for ``n_batches`` of a workload under a policy that does not fit."""
    blocks = policy.blocks((Block(0, (Batch(n_seqs, prompt_len),) * n_batches, max_new),))
    placement = policy.place(OPT, hardware, blocks)
    with pytest.raises(OutOfMemory) as caught:
        check_run(OPT, hardware, placement, policy.buffers, blocks)
    return remedy(caught.value, OPT, hardware, placement, policy, blocks, Sizes(fixed, n_batches))


TINY_GPU = replace(SMALL, gpu_bytes=2.5e8)
TINY_DISK = replace(SMALL, host_bytes=3e8, disk_bytes=1e6)


def test_the_model_alone_is_too_large():
    text = helps(TightLLM(), 1, 8, hardware=replace(TINY_GPU, gpu_bytes=1e6))
    assert text == "a smaller model, or a larger hardware.gpu_bytes"


@pytest.mark.parametrize(
    ("policy", "fixed", "words", "absent"),
    [
        (FlexGen(), True, "policy.attention=fused, a smaller workload.batch_size", "n_batches"),
        (FlexGen(), False, "a smaller workload.batch_size", "prompt_len"),
        (TightLLM(), True, "a smaller workload.batch_size, a smaller", "attention"),
        (ZeroInference(), True, "workload.batch_size, fewer workload.n_batches", "attention"),
    ],
)
def test_batches_are_named_where_they_are_what_is_large(policy, fixed, words, absent):
    text = helps(policy, 4096, 64, fixed=fixed)
    assert words in text
    assert absent not in text
    assert text.endswith(", or a larger hardware.gpu_bytes")


def test_batches_that_run_one_by_one_may_be_many():
    text = helps(Accelerate(), 4096, 8, max_new=256)
    assert text.startswith("a policy that keeps KV on the host (flexgen, tightllm), a smaller")
    assert "n_batches" not in text


def test_a_batch_of_one_cannot_be_smaller():
    text = helps(TightLLM(), 1, 2**20, n_batches=1)
    assert text == "a smaller workload.prompt_len, or a larger hardware.gpu_bytes"


def test_weights_are_named_where_they_are_what_is_large():
    text = helps(FlexGen(percent=(100, 0, 0, 100, 0, 100)), 1, 8, hardware=TINY_GPU)
    assert text.startswith("a smaller share of the resident weights in policy.percent, or")
    text = helps(TightLLM(placement="gpu"), 1, 8, hardware=TINY_GPU)
    assert text.startswith("policy.placement=host, or")
    text = helps(TightLLM(), 1, 8, hardware=TINY_DISK)
    assert text == "a larger hardware.host_bytes, or a larger hardware.disk_bytes"


def test_every_pool_has_a_setting_but_what_the_model_alone_decides():
    """Pools are known by name: one that is renamed or new would lose its setting."""
    thirds = Shares(0.25, 0.25, 0.5)
    placement = Placement(((thirds, thirds),) * OPT.n_layers, (thirds,), Shares(0.5, 0.5, 0.0),
                          ((8,),))  # fmt: skip
    buffers = Buffers(relay_bytes=1, input_slots=1)
    block = Block(0, (Batch(2, 64),), 4)
    pools = run_pools(OPT, placement, buffers) + block_pools(OPT, placement, buffers, block)
    policies = (FlexGen(sep_layer=False), FlexGen(percent=(20, 30, 0, 50, 100, 0)),
                TightLLM(placement="gpu"))  # fmt: skip
    names = {pool.name.removeprefix("block 0: ") for pool in pools}
    helped = {
        pool.name.removeprefix("block 0: ")
        for pool in pools
        if any(list(_settings(pool, policy, Sizes(True, 2), 2)) for policy in policies)
    }
    assert names - helped == {"embeddings and head", "weight staging"}
    assert {*_OF_THE_BLOCK, *_OF_A_BATCH} <= names
