"""From a workload setting to blocks: batch size by memory, and messages that name the setting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.accelerate import Accelerate
from policies.errors import Infeasible, OutOfMemory
from policies.flexgen import FlexGen
from policies.mixed import Mixed
from policies.placement import block_kv_bytes
from policies.plan.memory import check_run
from policies.spec.workload import Batch, Block
from policies.tightllm import TightLLM
from sim.job import WorkloadSpec, fits_without_disk, make_job
from tests.policies_table import OPT, SMALL

POLICY = TightLLM()
FIXED = WorkloadSpec("fixed", "fixed", 3, None, prompt_len=100, gen_len=8)


def test_fixed():
    job = make_job(replace(FIXED, batch_size=5), OPT, SMALL, POLICY, 0)
    assert job.blocks == (Block(0, (Batch(5, 100),) * 3, 8),)
    assert (job.n_requests, job.padding_waste, job.n_cut) == (15, 0.0, 0)


@pytest.mark.parametrize("policy", [POLICY, FlexGen(), Accelerate()], ids=lambda p: p.name)
@pytest.mark.parametrize("gpu_bytes", [0.6e9, 2e9])
def test_auto_is_the_largest_power_of_two_that_fits(policy, gpu_bytes):
    hardware = replace(SMALL, gpu_bytes=gpu_bytes)
    fits = fits_without_disk(OPT, hardware, policy)
    size = make_job(FIXED, OPT, hardware, policy, 0).blocks[0].batches[0].n_seqs
    assert size & (size - 1) == 0
    assert fits(Block(0, (Batch(size, 100),) * 3, 8))
    assert not fits(Block(0, (Batch(2 * size, 100),) * 3, 8))


def test_auto_uses_no_disk():
    """A host with room for half of the KV halves the batch, although the disk would hold it."""
    plenty = make_job(FIXED, OPT, SMALL, POLICY, 0)
    weights = sum(OPT.layer_bytes(i) for i in range(OPT.n_layers))
    kv = block_kv_bytes(OPT, plenty.blocks[0])
    less = replace(SMALL, host_bytes=weights + 0.7 * kv)
    smaller = make_job(FIXED, OPT, less, POLICY, 0)
    assert smaller.blocks[0].n_seqs * 2 == plenty.blocks[0].n_seqs
    check_run(OPT, less, POLICY.place(OPT, less, plenty.blocks), POLICY.buffers, plenty.blocks)


def test_auto_counts_on_the_smaller_of_kv_and_inputs(monkeypatch):
    """Layer inputs are half of this model's KV; no plan is tried for a question of memory."""
    policy = Mixed(solver="dp")
    kv = block_kv_bytes(OPT, Block(0, (Batch(16, 100),) * 3, 8))
    weights = sum(OPT.layer_bytes(i) for i in range(OPT.n_layers))
    tight = replace(SMALL, host_bytes=weights + 0.6 * kv)
    monkeypatch.setattr(Mixed, "place", lambda *_: pytest.fail("placed"))
    sizes = [
        make_job(FIXED, OPT, tight, p, 0).blocks[0].batches[0].n_seqs for p in (policy, POLICY)
    ]
    assert sizes == [16, 8]


def test_auto_is_one_where_nothing_fits():
    tiny = replace(SMALL, gpu_bytes=1e6)
    job = make_job(FIXED, OPT, tiny, POLICY, 0)
    assert job.blocks[0].batches[0].n_seqs == 1
    with pytest.raises(OutOfMemory):
        check_run(OPT, tiny, POLICY.place(OPT, tiny, job.blocks), POLICY.buffers, job.blocks)


def test_shipped_sample_is_stratified_capped_and_seeded():
    spec = WorkloadSpec("sharegpt", "sharegpt", 4, 4, limit=64, max_new=32)
    one, same, other = (make_job(spec, OPT, SMALL, POLICY, seed) for seed in (0, 0, 1))
    assert one.n_requests == 64
    assert max(block.max_new for block in one.blocks) <= 32
    assert one.n_cut > 0
    assert one == same != other


def test_trace_file(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "record_id,prompt_tokens,cached_prefix_tokens,response_tokens\na,10,0,3\nb,20,5,9\n"
    )
    spec = WorkloadSpec("mine", "path", 2, 1, path=str(path))
    try:
        job = make_job(spec, OPT, SMALL, POLICY, 0)
    except ValueError as error:  # the schema has more columns than this test cares about
        pytest.fail(str(error))
    # Prompt: cached prefix, prompt and the one token that starts the response.
    assert [b.prompt_len for b in job.blocks[0].batches] == [26, 11]
    assert job.blocks[0].max_new == 9
    assert job.decode_tokens == 8 + 2


def test_all_requests_rejected_is_infeasible():
    spec = WorkloadSpec("sharegpt", "sharegpt", 4, 4, limit=8, reject_long=True)
    with pytest.raises(Infeasible):
        make_job(spec, replace(OPT, max_positions=1), SMALL, POLICY, 0)


def test_a_fixed_job_beyond_the_positions_is_counted_and_warned_about(caplog):
    model = replace(OPT, max_positions=FIXED.prompt_len + FIXED.gen_len - 2)
    job = make_job(FIXED, model, SMALL, POLICY, 0)
    assert job.n_too_long == job.n_requests
    assert "exceed the model's" in caplog.text
    with pytest.raises(Infeasible, match="reject_long is set"):
        make_job(replace(FIXED, reject_long=True), model, SMALL, POLICY, 0)
    assert make_job(FIXED, replace(OPT, max_positions=10**6), SMALL, POLICY, 0).n_too_long == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": 3}, "workload.limit: 3 has no meaning with a fixed workload"),
        ({"max_new": 1}, "workload.max_new: 1 has no meaning with a fixed workload"),
        (
            {"source": "wikitext"},
            "workload.source: 'wikitext' must be one of fixed, path, sharegpt",
        ),
        ({"n_batches": 0}, "workload.n_batches: 0 must be >= 1"),
        ({"prompt_len": 0}, "workload.prompt_len: 0 must be >= 1"),
        ({"gen_len": -1}, "workload.gen_len: -1 must be >= 1"),
        ({"batch_size": 0}, "workload.batch_size: 0 must be >= 1 or auto"),
        ({"source": "sharegpt", "limit": 0}, "workload.limit: 0 must be >= 1 or null"),
        ({"source": "sharegpt", "max_new": 0}, "workload.max_new: 0 must be >= 1 or null"),
        ({"source": "path"}, "workload.path: is empty"),
    ],
)
def test_bad_setting_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(FIXED, **changes)
