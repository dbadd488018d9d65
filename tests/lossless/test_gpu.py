"""What only a CUDA device can show: half precision, real overlap, pinned memory, no allocation.

Run with ``pytest -m gpu``. Everything else of the engine is tested on its CPU twin.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from policies.drive import Policy
from policies.flexgen import FlexGen
from policies.plan.op import Lane
from policies.spec.workload import Batch, Block
from policies.trace.metrics import metrics
from real.arena import HostArena
from real.checkpoint import Random
from tests.lossless.engine import FAMILIES, JOBS, UNIFORM, Job, Outcome, job, run
from tests.lossless.mixes import ALL, MIXES, FixedMix
from tests.lossless.test_every_policy import VARIANTS, expected, plain
from tests.policies_table import SMALL, FixedRecompute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda", 0)
MARGIN = 0.05  # of the logits' spread: below it half precision may choose the other token
# Heads of 64, as the flash kernel wants; short enough for the plain forward.
WIDE = {
    name: replace(model, d_model=256, head_dim=64, d_ffn=512) for name, model in FAMILIES.items()
}
WIDE_JOB = job([Block(0, (Batch(3, 12), Batch(2, 12)), 5)])
RAGGED = job([Block(0, (Batch(3, 12), Batch(2, 9)), 5)], lengths=[12, 3, 7, 9, 1])
HALF = (
    "accelerate",
    "flexgen",
    "flexgen-pinned",
    "flexgen-20-80",
    "flexgen-cpu-attention",
    "tightllm",
    "recompute-one",
    "recompute-all",
    "recompute-changing",
)


ENGINES: dict[str, Policy] = {**VARIANTS, **MIXES}


def check_where_clear(outcome: Outcome, tokens, logits) -> None:  # type: ignore[no-untyped-def]
    """Tokens equal up to the first step whose best two logits are too close to tell."""
    n_clear = 0
    for mine, right, rows in zip(outcome.tokens, tokens, logits, strict=True):
        for step, row in enumerate(rows):
            second, first = np.sort(row)[-2:]
            if first - second < MARGIN * row.std():
                break
            assert mine[step] == right[step]
            n_clear += 1
    assert n_clear > len(tokens), "no margin was clear: the test shows nothing"


@cache
def wide(family: str, padded: bool):  # type: ignore[no-untyped-def]
    """What the plain forward says of the wide models."""
    return plain(WIDE[family], RAGGED if padded else WIDE_JOB, "float16")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", [*HALF, *MIXES])
def test_half_precision_tokens(policy: str, family: str, padded: bool, tmp_path: Path) -> None:
    work = RAGGED if padded else WIDE_JOB
    outcome = run(WIDE[family], work, ENGINES[policy], "float16", device=CUDA, disk_dir=tmp_path)
    check_where_clear(outcome, *wide(family, padded))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ENGINES)
def test_float32_tokens(policy: str, family: str, tmp_path: Path) -> None:
    for name in ("uniform", "ragged"):
        outcome = run(FAMILIES[family], JOBS[name], ENGINES[policy], "float32", device=CUDA,
                      disk_dir=tmp_path, delay_seed=1)  # fmt: skip
        assert outcome.tokens == expected(family, name, "float32")[0]


# ---- speed --------------------------------------------------------------------------------------

# Layers of 100 MB and KV of 134 MB a batch: copies of milliseconds, and few of them.
BIG = replace(
    FAMILIES["opt"],
    n_layers=4,
    d_model=2048,
    n_heads=16,
    n_kv_heads=16,
    head_dim=128,
    d_ffn=8192,
    vocab=2048,
    max_positions=2048,
    learned_positions=2050,
)
BIG_JOB = job([Block(0, (Batch(16, 1024),) * 3, 6)], vocab=2048)


def big(policy: Policy, work: Job = BIG_JOB) -> Outcome:
    roomy = replace(SMALL, gpu_bytes=100e9, host_bytes=100e9)
    return run(BIG, work, policy, "float16", device=CUDA, hardware=roomy, poison=False, keep=True,
               source=Random(0, torch.float16, CUDA))  # fmt: skip


@pytest.mark.parametrize(
    "policy",
    [
        FixedRecompute((300,)),
        FlexGen(kv_pinned=True),
        FlexGen(),
        FixedMix((ALL,), (50,)),
        FixedMix((500, 1, 0), (40,), (100,)),
    ],
    ids=["recompute", "flexgen-pinned", "flexgen", "inputs", "all-sources"],
)
def test_the_loop_asks_the_driver_for_no_memory(policy: Policy) -> None:
    outcome = big(policy)
    backend = outcome.backend
    try:
        before = torch.cuda.memory_stats(CUDA)
        backend.execute()
        after = torch.cuda.memory_stats(CUDA)
    finally:
        backend.close()
        backend.arenas.close()
    for name in ("segment.all.allocated", "num_alloc_retries", "num_ooms"):
        assert after.get(name, 0) == before.get(name, 0), name


@pytest.mark.parametrize(
    "policy", [FixedRecompute((300,)), FixedMix((ALL,), (50,))], ids=["recompute", "inputs"]
)
def test_copies_and_compute_overlap(policy: Policy) -> None:
    """Busy time of copies and compute exceeds the time that passed."""
    outcome = big(policy)
    backend = outcome.backend
    try:
        trace = backend.execute()  # the first run warmed up
    finally:
        backend.close()
        backend.arenas.close()
    busy = metrics(trace).busy
    assert busy[Lane.H2D] + busy[Lane.COMPUTE] > 1.1, busy
    lanes = {lane: [s for s in trace.spans if s.lane is lane] for lane in Lane}
    for spans in lanes.values():
        for one, two in pairwise(spans):
            assert two.start_s >= one.end_s - 20e-6, (one.key, two.key)


def test_attention_on_the_cpu_overlaps_the_gpu() -> None:
    """While one batch attends on the CPU, others load and compute."""
    outcome = big(FixedMix(on_cpu=(1,)))
    backend = outcome.backend
    try:
        trace = backend.execute()
    finally:
        backend.close()
        backend.arenas.close()
    attending = [s for s in trace.spans if s.lane is Lane.CPU]
    others = [s for s in trace.spans if s.lane in (Lane.COMPUTE, Lane.H2D)]
    assert attending
    shared_s = sum(
        max(0.0, min(a.end_s, o.end_s) - max(a.start_s, o.start_s))
        for a in attending
        for o in others
    )
    assert shared_s > 0.1 * sum(s.end_s - s.start_s for s in attending)


@pytest.mark.parametrize(
    "policy",
    [FixedRecompute((2,)), MIXES["front-inputs-kv-tail"], MIXES["cpu-one-batch"]],
    ids=["recompute", "all-sources", "cpu"],
)
def test_poison_and_delays_change_no_token(policy: Policy) -> None:
    reference = run(WIDE["llama"], UNIFORM, policy, "float16", device=CUDA, poison=False)
    for seed in range(3):
        outcome = run(WIDE["llama"], UNIFORM, policy, "float16", device=CUDA, delay_seed=seed)
        assert outcome.tokens == reference.tokens


def test_pinned_memory_is_registered_and_fast() -> None:
    """Allocation itself fails if a copy blocks its thread; here the rate is looked at, too."""
    nbytes = 512 * 2**20
    arena = HostArena(pinned=True)
    host = arena.allocate({"a": nbytes, "b": 4096})["a"]
    assert arena.locked_bytes == arena.booked_bytes == nbytes + 4096
    device = torch.empty(nbytes, dtype=torch.uint8, device=CUDA)
    pageable = torch.ones(nbytes, dtype=torch.uint8)

    def seconds(source: torch.Tensor) -> float:
        best = float("inf")
        for _ in range(3):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            device.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start_s)
        return best

    assert seconds(host) < seconds(pageable)
    arena.close()
    assert arena.locked_bytes == 0
