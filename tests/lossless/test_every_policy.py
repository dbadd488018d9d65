"""No policy changes a model: logits within 1e-10 of a plain forward, tokens equal.

Everything runs poisoned: what a slot held before, and every region that is recomputed, is NaN.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from policies.flexgen import FlexGen
from policies.plan.link import LinkedOp
from policies.plan.op import Kind, Lane, Op, Scope, Tier
from policies.spec.model import ModelSpec
from policies.tightllm import TightLLM
from real import backend as engine
from real.architecture import DTYPES
from real.layout import edge_shapes, tensor_shapes
from tests.lossless.engine import FAMILIES, JOBS, UNIFORM, Drawn, Job, in_dtype, overflowing, run
from tests.lossless.plain import Array, Lookup, plain_greedy
from tests.policies_table import ALL, POLICIES, FixedRecompute

TOLERANCE = 1e-10

VARIANTS = POLICIES | {
    "recompute-none": FixedRecompute((0,)),
    "recompute-all-but-one": FixedRecompute((-1,)),
    "recompute-growing": FixedRecompute((0, 1, 3, ALL)),
    "recompute-shrinking": FixedRecompute((ALL, ALL, 2, 0)),
    "flexgen-activations-on-host": FlexGen(percent=(0, 100, 0, 100, 0, 100), kv_pinned=True),
    "flexgen-activations-split": FlexGen(percent=(30, 70, 0, 100, 40, 60), sep_layer=False),
    "flexgen-most-weights-on-gpu": FlexGen(percent=(70, 30, 100, 0, 100, 0)),
    "flexgen-all-on-gpu": FlexGen(percent=(100, 0, 100, 0, 100, 0)),
    "flexgen-everything-split": FlexGen(percent=(20, 40, 30, 30, 50, 50)),
    "tightllm-auto": TightLLM(placement="auto", solver="dp"),
    "tightllm-unfused": TightLLM(attention="unfused", solver="dp"),
}


def lookup(model: ModelSpec, dtype: str) -> Lookup:
    """Weights as plain arrays."""
    source = Drawn(DTYPES[dtype])
    shapes = tensor_shapes(model, Scope.ATTENTION) | tensor_shapes(model, Scope.MLP)
    shapes |= edge_shapes(model)
    held: dict[tuple[str, int | None], Array] = {}

    def find(name: str, layer: int | None) -> Array:
        if (name, layer) not in held:
            held[name, layer] = source.array(name, layer, shapes[name])
        return held[name, layer]

    return find


@cache
def expected(
    family: str, job: str, dtype: str
) -> tuple[list[list[int]], list[npt.NDArray[np.float64]]]:
    return plain(FAMILIES[family], JOBS[job], dtype)


def plain(
    model: ModelSpec, job: Job, dtype: str
) -> tuple[list[list[int]], list[npt.NDArray[np.float64]]]:
    """Tokens and logits of every sequence, one at a time, without padding."""
    weights = lookup(model, dtype)
    new = [block.max_new for block in job.blocks for b in block.batches for _ in range(b.n_seqs)]
    results = [plain_greedy(model, weights, p, n) for p, n in zip(job.prompts, new, strict=True)]
    return [tokens for tokens, _ in results], [logits for _, logits in results]


def check(outcome, tokens, logits) -> None:  # type: ignore[no-untyped-def]
    assert outcome.tokens == tokens
    for mine, plain in zip(outcome.logits, logits, strict=True):
        assert np.abs(mine - plain).max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", VARIANTS)
def test_logits_equal_a_plain_forward(policy: str, family: str, tmp_path: Path) -> None:
    outcome = run(FAMILIES[family], UNIFORM, VARIANTS[policy], disk_dir=tmp_path)
    check(outcome, *expected(family, "uniform", "float64"))


SOME = (
    "accelerate",
    "accelerate-big",
    "flexgen",
    "flexgen-on-disk",
    "flexgen-everything-split",
    "flexgen-cpu-attention",
    "tightllm",
    "tightllm-unfused",
    "recompute-one",
    "recompute-all",
    "recompute-all-but-one",
    "recompute-changing",
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("job", [name for name in JOBS if name != "uniform"])
@pytest.mark.parametrize("policy", SOME)
def test_any_job(policy: str, job: str, family: str, tmp_path: Path) -> None:
    outcome = run(FAMILIES[family], JOBS[job], VARIANTS[policy], disk_dir=tmp_path)
    check(outcome, *expected(family, job, "float64"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", SOME)
def test_one_layer(policy: str, family: str, tmp_path: Path) -> None:
    model = replace(FAMILIES[family], n_layers=1)
    outcome = run(model, JOBS["two-blocks"], VARIANTS[policy], disk_dir=tmp_path)
    check(outcome, *plain(model, JOBS["two-blocks"], "float64"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", SOME)
def test_float32_tokens_are_equal(policy: str, family: str, tmp_path: Path) -> None:
    outcome = run(FAMILIES[family], UNIFORM, VARIANTS[policy], "float32", disk_dir=tmp_path)
    assert outcome.tokens == expected(family, "uniform", "float32")[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("policy", "share"),
    [
        ("accelerate", 0.4),  # its KV is on the GPU: only weights overflow
        ("flexgen-pinned", 0.75),
        ("flexgen-pinned", 0.4),
        ("tightllm-dp", 0.75),
        ("tightllm-dp", 0.4),
        ("recompute-changing", 0.75),
        ("recompute-changing", 0.4),
    ],
)
def test_what_overflows_the_host_lives_on_disk(
    policy: str, family: str, share: float, tmp_path: Path
) -> None:
    model = in_dtype(FAMILIES[family], "float64")
    hardware = overflowing(model, UNIFORM.blocks, VARIANTS[policy], share)
    outcome = run(model, UNIFORM, VARIANTS[policy], hardware=hardware, disk_dir=tmp_path)
    check(outcome, *expected(family, "uniform", "float64"))
    kinds = {op.kind for op in outcome.ops}
    assert kinds & {Kind.READ_KV, Kind.READ_WEIGHT}, "the scenario has nothing on disk"
    assert list(tmp_path.iterdir()) == [], "the file of the disk tier was left behind"


@pytest.mark.parametrize("policy", SOME)
@pytest.mark.parametrize("seed", [1, 2])
def test_delays_change_no_token(policy: str, seed: int, tmp_path: Path) -> None:
    outcome = run(FAMILIES["llama"], JOBS["two-blocks"], VARIANTS[policy], disk_dir=tmp_path,
                  delay_seed=seed)  # fmt: skip
    check(outcome, *expected("llama", "two-blocks", "float64"))


def test_gpu_tier_holds_no_weights_that_stream() -> None:
    """The scenario of whole matrices on the GPU is really mixed: some of each layer moves."""
    policy = VARIANTS["flexgen-20-80"]
    outcome = run(FAMILIES["opt"], UNIFORM, policy)
    shares = outcome.placement.weights[0]
    assert any(0 < part.gpu < 1 for part in shares)
    assert any(op.kind is Kind.LOAD_WEIGHT for op in outcome.ops)
    assert any(slot.tier is Tier.GPU and "weights/l" in slot.name
               for op in outcome.ops for slot in op.reads)  # fmt: skip


def test_a_missing_dependency_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What poison and delays are for: forwards that do not wait give other tokens."""
    whole = engine.link

    def forgetful(ops: Iterable[Op]) -> Iterator[LinkedOp]:
        for item in whole(ops):
            yield item._replace(deps=()) if item.op.kind is Kind.FORWARD else item

    def slow_loads(_backend: object, _clock: object) -> Callable[[Lane], None]:
        return lambda lane: time.sleep(2e-3) if lane is Lane.H2D else None

    monkeypatch.setattr(engine, "link", forgetful)
    monkeypatch.setattr(engine.RealBackend, "_delay", slow_loads)
    outcome = run(FAMILIES["opt"], UNIFORM, VARIANTS["recompute-none"])  # it has no fences
    assert outcome.tokens != expected("opt", "uniform", "float64")[0]
