"""No mix of sources changes a model: loaded, projected from layer inputs, recomputed at either end.

Like the policies of ``test_every_policy``, everything runs poisoned: slots of layer inputs, rows
into which keys are projected and homes hold NaN before they are written.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from policies.errors import PlanError
from policies.plan.op import Kind, Scope, Tier
from policies.spec.workload import Batch, Block
from tests.lossless.engine import (
    FAMILIES,
    JOBS,
    UNIFORM,
    Outcome,
    in_dtype,
    job,
    overflowing,
    run,
)
from tests.lossless.mixes import ALL, MIXES, FixedMix
from tests.lossless.test_every_policy import check, expected, plain

# Steps enough for homes of four ranges and for tails that shrink and grow.
LONGER = job([Block(0, (Batch(2, 5), Batch(1, 3), Batch(3, 5)), 6)])
MHA = replace(FAMILIES["llama"], name="tiny-mha", n_kv_heads=4)
MODELS = {**FAMILIES, "llama-mha": MHA}


@cache
def longer(family: str, dtype: str = "float64"):  # type: ignore[no-untyped-def]
    """What the plain forward says of the longer job."""
    return plain(MODELS[family], LONGER, dtype)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("mix", MIXES)
def test_logits_equal_a_plain_forward(mix: str, family: str) -> None:
    outcome = run(MODELS[family], LONGER, MIXES[mix])
    check(outcome, *longer(family))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("work", [name for name in JOBS if name != "uniform"])
@pytest.mark.parametrize("mix", MIXES)
def test_any_job(mix: str, work: str, family: str) -> None:
    outcome = run(FAMILIES[family], JOBS[work], MIXES[mix])
    check(outcome, *expected(family, work, "float64"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mix", MIXES)
def test_one_layer_in_float32(mix: str, family: str) -> None:
    model = replace(FAMILIES[family], n_layers=1)
    outcome = run(model, JOBS["two-blocks"], MIXES[mix], "float32")
    assert outcome.tokens == plain(model, JOBS["two-blocks"], "float32")[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mix", MIXES)
def test_float32_tokens_are_equal(mix: str, family: str) -> None:
    assert (
        run(FAMILIES[family], LONGER, MIXES[mix], "float32").tokens == longer(family, "float32")[0]
    )


ON_DISK = [name for name, mix in MIXES.items() if not mix.on_cpu]


@pytest.mark.parametrize("share", [0.8, 0.4])
@pytest.mark.parametrize("mix", ON_DISK)
def test_what_overflows_the_host_lives_on_disk(mix: str, share: float, tmp_path: Path) -> None:
    """A share of 0.8 cuts rows between host and disk; with 0.4 all of them are on disk."""
    model = in_dtype(FAMILIES["llama"], "float64")
    policy = replace(
        MIXES[mix], books_inputs=False
    )  # as if all were KV: then some of it is on disk
    hardware = overflowing(model, LONGER.blocks, policy, share)
    outcome = run(model, LONGER, policy, hardware=hardware, disk_dir=tmp_path)
    check(outcome, *longer("llama"))
    assert outcome.placement.kv[0].disk == pytest.approx(1.0) or share == 0.8
    if mix != "nothing-stored":
        kinds = {op.kind for op in outcome.ops}
        assert kinds & {Kind.WRITE_KV, Kind.WRITE_ACT}, "the scenario has nothing on disk"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", [1, 2])
def test_delays_change_no_token(mix: str, seed: int) -> None:
    outcome = run(FAMILIES["llama"], JOBS["two-blocks"], MIXES[mix], delay_seed=seed)
    check(outcome, *expected("llama", "two-blocks", "float64"))


# ---- what the scenarios contain -----------------------------------------------------------------


def ranges_of(outcome: Outcome, kind: Kind, step: int) -> list[tuple[str, int, int]]:
    """Ranges that a step moves in layer 1 of batch 0: what, first, end."""
    return [
        ("input" if op.scope is Scope.INPUT else "kv", op.start, op.stop)
        for op in outcome.ops
        if op.kind in (kind, Kind(kind.value.replace("kv", "act"))) and op.step == step
        and op.layer == 1 and op.batch == 0 and op.scope in (Scope.LAYER, Scope.INPUT)
    ]  # fmt: skip


def test_homes_of_four_ranges_are_reached() -> None:
    outcome = run(FAMILIES["opt"], LONGER, MIXES["ranged"])
    last = ranges_of(outcome, Kind.LOAD_KV, 5)
    assert last == [("input", 0, 2), ("kv", 2, 5), ("input", 5, 6), ("kv", 6, 9)]


@pytest.mark.parametrize(
    ("mix", "n_project"),
    [("kv", 0), ("one-input", 1), ("all-inputs-but-one", 4), ("prompt-as-inputs", 5)],
)
def test_degenerate_counts_are_reached(mix: str, n_project: int) -> None:
    """Of the five tokens cached after prefill, so many are projected in the first decode step."""
    outcome = run(FAMILIES["opt"], LONGER, MIXES[mix])
    forwards = [op for op in outcome.ops if op.kind is Kind.FORWARD and op.scope is Scope.LAYER]
    counts = {op.n_project for op in forwards if op.step == 1 and op.batch == 0}
    assert counts == {n_project}


def test_all_sources_meet_in_one_step() -> None:
    outcome = run(FAMILIES["opt"], LONGER, MIXES["front-inputs-kv-tail"])
    forward = next(op for op in outcome.ops if op.key == "forward/g0/s4/l1/b0/p0")
    assert (forward.n_front, forward.n_project, forward.n_recompute, forward.n_ctx) == (2, 1, 1, 8)
    assert ranges_of(outcome, Kind.LOAD_KV, 4) == [("input", 2, 3), ("kv", 3, 7)]


# ---- memory -------------------------------------------------------------------------------------


def homes_bytes(outcome: Outcome) -> dict[str, int]:
    """Host bytes that the engine wants for homes of KV and of layer inputs."""
    return {need.name: need.nbytes for need in outcome.backend.wanted
            if need.tier is Tier.HOST and need.name in ("KV", "layer inputs")}  # fmt: skip


# Rows of whole pages, so that homes are counted to the byte.
WIDE = {name: replace(model, d_model=512, head_dim=128) for name, model in MODELS.items()}
PAGED = job([Block(0, (Batch(1, 8), Batch(1, 8)), 4)])


def test_inputs_take_half_of_the_memory_of_mha_kv() -> None:
    kv, inputs, ranged = (
        homes_bytes(run(WIDE["opt"], PAGED, mix))
        for mix in (FixedMix(), FixedMix((ALL,)), FixedMix((4, 1, 0)))
    )
    token = 2 * 3 * 512 * 8  # of both batches in all layers, as input
    assert kv == {"KV": 2 * 10 * token}
    assert inputs == {"layer inputs": 10 * token}
    assert ranged == {"KV": 2 * 5 * token, "layer inputs": 5 * token}


def test_what_is_recomputed_at_the_end_has_no_home() -> None:
    held = homes_bytes(run(WIDE["llama-mha"], PAGED, FixedMix((4, 0), (2,))))
    token = 2 * 3 * 512 * 8
    assert held == {"KV": 2 * 4 * token, "layer inputs": 4 * token}


# ---- plans that the engine refuses --------------------------------------------------------------


def test_inputs_beside_kv_on_the_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from policies.placement import Shares

    real = FixedMix.place

    def split(self, model, hardware, blocks):  # type: ignore[no-untyped-def]
        placed = real(self, model, hardware, blocks)
        return replace(placed, kv=(Shares(0.5, 0.5, 0.0),))

    monkeypatch.setattr(FixedMix, "place", split)
    with pytest.raises(PlanError, match="layer inputs need a placement without KV on the GPU"):
        run(FAMILIES["opt"], UNIFORM, FixedMix((2,)))


def test_cpu_attention_over_inputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = FixedMix._decision

    def keeps_inputs(self, step, n_ctx, homes):  # type: ignore[no-untyped-def]
        decision = decide(self, step, n_ctx, homes)
        return replace(decision, n_inputs=(1,) * len(n_ctx)) if step == 1 else decision

    monkeypatch.setattr(FixedMix, "_decision", keeps_inputs)
    with pytest.raises(PlanError, match="attention on the CPU needs the KV of all cached tokens"):
        run(FAMILIES["opt"], UNIFORM, FixedMix(on_cpu=(0, 1, 2)))


# ---- attention on the CPU -----------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 2000, 10**6])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float32, 1e-6), (torch.float64, 1e-14)],
)
def test_cpu_attention_equals_a_softmax(
    dtype: torch.dtype, tolerance: float, chunk_bytes: int, padded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whatever the chunks; some hold nothing but padding of a sequence."""
    from real import cpu_attention as cpu

    monkeypatch.setattr(cpu, "_CHUNK_BYTES", chunk_bytes)
    n_keys, n_seqs, n_heads, n_groups, head_dim = 37, 3, 4, 2, 8
    draw = torch.Generator().manual_seed(0)
    kv = torch.randn(n_keys, n_seqs, 2, n_groups, head_dim, generator=draw).to(dtype)
    qkv = torch.randn(n_seqs, (n_heads + 2 * n_groups) * head_dim, generator=draw).to(dtype)
    pad = torch.tensor([0, 36, 20]) if padded else None
    row = kv[0].numel()
    wide = torch.full((cpu.chunk_tokens(n_keys, row, dtype) * row,), float("nan"))
    out = torch.empty(n_seqs, n_heads * head_dim, dtype=dtype)
    cpu.attend_on_cpu(qkv, kv, pad, out, n_heads, wide)

    q, k, v = qkv.double().split([n_heads * head_dim, n_groups * head_dim, n_groups * head_dim], -1)
    for s in range(n_seqs):
        first = 0 if pad is None else int(pad[s])
        for h in range(n_heads):
            g, at = h // (n_heads // n_groups), slice(h * head_dim, (h + 1) * head_dim)
            group = slice(g * head_dim, (g + 1) * head_dim)
            keys = torch.cat([kv[first:, s, 0, g].double(), k[s : s + 1, group]])
            values = torch.cat([kv[first:, s, 1, g].double(), v[s : s + 1, group]])
            weights = torch.softmax(keys @ q[s, at] / head_dim**0.5, dim=0)
            assert (out[s, at].double() - weights @ values).abs().max() < tolerance
