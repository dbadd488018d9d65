"""Simulator and engine execute the same plan: same keys, same order a lane, same decisions."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from calibrate.replay import first_difference, read_runs, replay
from calibrate.report import Tolerance, make_report
from policies.cost.model import CostModel
from policies.cost.size import nbytes
from policies.plan.link import link
from policies.plan.op import Attention, Kind, Lane
from policies.run_request import RunRequest, read_request
from policies.spec.hardware import Link
from policies.spec.workload import Batch, Block
from policies.trace.check import check_bytes, check_causality, check_clock, check_keys
from policies.trace.jsonl import read_jsonl
from policies.trace.sources import source_columns
from policies.trace.span import Trace
from real import transfers
from real.disk import DiskStore
from real.files import write_result
from real.run import Options, run_request
from real.setup import Arenas
from sim.decisions import DecisionLog
from sim.engine import SimBackend
from tests.lossless.engine import CPU, FAMILIES, UNIFORM, in_dtype, overflowing, run
from tests.lossless.mixes import MIXES
from tests.policies_table import POLICIES, SMALL

NAMED = [name for name in POLICIES if not name.startswith("recompute")]


def lane_order(trace: Trace) -> dict[Lane, list[str]]:
    """Keys of each lane by their start."""
    spans = sorted(enumerate(trace.spans), key=lambda item: (item[1].start_s, item[0]))
    return {lane: [s.key for _, s in spans if s.lane is lane] for lane in Lane}


@pytest.mark.parametrize("name", NAMED)
def test_sim_and_real_run_one_request(name: str, tmp_path: Path) -> None:
    model = in_dtype(FAMILIES["llama"], "float32")
    asked = RunRequest(name, model, SMALL, POLICIES[name], UNIFORM.blocks, dtype="float32")
    path = tmp_path / "request.json"
    path.write_text(asked.to_json())
    request = read_request(path)

    arenas = Arenas.of(CPU)
    (result,) = run_request(request, Options(CPU, tmp_path), arenas)
    write_result(tmp_path / "real", request, result)
    real = read_jsonl(tmp_path / "real" / "trace.jsonl")

    placement = request.policy.place(model, request.machine, request.policy.blocks(request.blocks))
    costs = CostModel(model, request.machine, placement)
    log = DecisionLog(request.policy.blocks(request.blocks))
    decided: dict[tuple[int, int], tuple[int, ...]] = {}
    slices: dict[tuple[int, int], tuple[int, ...]] = {}

    def observe(block, step, decision) -> None:  # type: ignore[no-untyped-def]
        decided[block, step], slices[block, step] = decision.n_recompute, decision.slices
        log.observe(block, step, decision)

    ops = list(request.plan(costs, observe))
    simulated = SimBackend(costs, request.hardware.duplex).run(ops)

    assert [s.key for s in real.spans] == [s.key for s in simulated.spans]
    assert lane_order(real) == lane_order(simulated)
    linked = list(link(ops))
    check_keys(real, linked)
    check_bytes(real, linked, costs)
    check_clock(real, 0.0)
    check_causality(real, linked, 0.0)

    with (tmp_path / "real" / "decisions.csv").open() as file:
        rows = [{key: int(value) for key, value in row.items()} for row in csv.DictReader(file)]
    assert rows
    for row in rows:
        where = row["block"], row["step"]
        assert row["n_recompute"] == decided[where][row["batch"]]
        assert row["slices"] == slices[where][row["batch"]]
    record = json.loads((tmp_path / "real" / "result.json").read_text())
    assert record["status"] == "ok"
    found = log.sources(placement, request.policy.buffers.attention is Attention.CPU)
    assert {name: record[name] for name in source_columns(None)} == source_columns(found)
    assert record["makespan_s"] == real.makespan_s
    assert record["tokens_sha256"]


def test_repeats_give_the_same_tokens_and_their_own_times(tmp_path: Path) -> None:
    model = in_dtype(FAMILIES["opt"], "float32")
    request = RunRequest("twice", model, SMALL, POLICIES["tightllm-dp"], UNIFORM.blocks,
                         dtype="float32")  # fmt: skip
    first, second = run_request(request, Options(CPU, tmp_path, repeat=2), Arenas.of(CPU))
    assert first.tokens == second.tokens
    assert first.record["prefill_s"] != second.record["prefill_s"]


@pytest.mark.parametrize("steps_run", [0, 1, 2])
def test_a_cut_run_is_the_beginning_of_the_whole_one(steps_run: int) -> None:
    policy = POLICIES["tightllm-dp"]
    whole = run(FAMILIES["opt"], UNIFORM, policy)
    cut = run(FAMILIES["opt"], UNIFORM, policy, steps_run=steps_run)
    assert cut.tokens == [tokens[: steps_run + 1] for tokens in whole.tokens]
    kept = [op for op in whole.ops[:-1] if op.step <= steps_run]
    assert list(cut.ops) == [*kept, whole.ops[-1]]
    assert set(cut.decisions) == {(0, step) for step in range(steps_run + 1)}


@pytest.mark.parametrize(("name", "steps_run"), [("mixed", None), ("tightllm-dp", 3)])
def test_a_closed_loop_is_replayed_by_its_decisions(
    name: str, steps_run: int | None, tmp_path: Path
) -> None:
    """Its decisions follow from measured times; simulated under them, its plan is the same."""
    slow = replace(SMALL, h2d=Link(1e-5, 1e5))
    policy = replace(POLICIES[name], feedback=True, bucket_tokens=1)
    blocks = (Block(0, (Batch(2, 9), Batch(3, 6)), 7), Block(1, (Batch(2, 5),), 3))
    model = in_dtype(FAMILIES["llama"], "float32")
    asked = RunRequest(name, model, slow, policy, blocks, dtype="float32", steps_run=steps_run)
    arenas = Arenas.of(CPU)
    for i, result in enumerate(run_request(asked, Options(CPU, tmp_path, repeat=2), arenas)):
        write_result(tmp_path / f"r{i}", asked, result)
        record = result.record
        assert record["status"] == "ok"
        assert record["feedback_belief_changes"] >= 1
        n_planned = len(record["feedback_host_s"])
        assert n_planned == len(record["feedback_late_s"]) > 0
    runs, unusable = read_runs(tmp_path)
    assert not unusable
    open_loop = replay(asked, SMALL)
    for run_ in runs:
        closed = replay(asked, SMALL, run_.decisions)
        assert closed.decisions == run_.decisions
        assert [s.key for s in closed.trace.spans] == [s.key for s in run_.trace.spans]
        assert [s.nbytes for s in closed.trace.spans] == [s.nbytes for s in run_.trace.spans]
        assert first_difference(run_.decisions, open_loop.decisions)
    report = make_report(tmp_path, SMALL, Tolerance(1e9, 1e9), Tolerance(1e9, 1e9))
    assert report.passed
    assert all(run_.closed_loop for run_ in report.runs)
    assert len({run_.name for run_ in report.runs}) == len(report.runs)


MOVES = (Kind.LOAD_WEIGHT, Kind.LOAD_KV, Kind.STORE_KV, Kind.HOST_COPY)
DISK = (Kind.READ_WEIGHT, Kind.READ_KV, Kind.WRITE_KV)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name",
    [
        "accelerate",
        "flexgen",
        "flexgen-20-80",
        "flexgen-cpu-attention",
        "flexgen-kv-split",
        "tightllm-dp",
        "recompute-changing",
        "ranged-with-tail",
        "cpu-first-and-inputs",
    ],
)
def test_what_is_copied_is_what_the_plan_counts(
    name: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits, the width of activations that costs assume, every copy has the plan's bytes."""
    moved: list[int] = []
    made = transfers.Transfers.make
    copier = transfers._copier
    counted: dict[str, int] = {}

    def counting_copier(copies, *, asynchronous):  # type: ignore[no-untyped-def]
        across = [t for t, s in copies if not _inside_gpu(copies)]
        moved.append(sum(t.nbytes for t in across))
        return copier(copies, asynchronous=asynchronous)

    def counting_make(self, op):  # type: ignore[no-untyped-def]
        moved.clear()
        run_it = made(self, op)
        counted[op.key] = sum(moved)
        return run_it

    monkeypatch.setattr(transfers, "_copier", counting_copier)
    monkeypatch.setattr(transfers.Transfers, "make", counting_make)
    policy = (POLICIES | MIXES)[name]
    outcome = run(FAMILIES[family], _even(name), policy, "bfloat16", poison=False)
    model = in_dtype(FAMILIES[family], "bfloat16")
    checked = [op for op in outcome.ops if op.kind in (*MOVES, Kind.LOAD_ACT, Kind.STORE_ACT)]
    assert checked
    for op in checked:
        assert counted[op.key] == nbytes(op, model, outcome.placement), op.key


def _even(name: str):  # type: ignore[no-untyped-def]
    """Batches of even size: the split of sequences between GPU and host is whole."""
    from policies.spec.workload import Batch, Block
    from tests.lossless.engine import job

    return job([Block(0, (Batch(2, 6), Batch(2, 6)), 4)])


def _inside_gpu(copies) -> bool:  # type: ignore[no-untyped-def]
    """Gathers and scatters of split rows: two-dimensional, and no link moves them."""
    return any(t.dim() > 1 for t, _ in copies)


@pytest.mark.parametrize("share", [0.75, 0.4])
def test_what_the_disk_moves_is_what_the_plan_counts(
    share: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy, family = POLICIES["tightllm-dp"], FAMILIES["opt"]
    model = in_dtype(family, "bfloat16")
    hardware = overflowing(model, UNIFORM.blocks, policy, share)
    asked: list[int] = []
    for method in ("reader", "writer"):
        original = getattr(DiskStore, method)

        def counting(self, region, start, length, staging, original=original):  # type: ignore[no-untyped-def]
            asked.append(length)
            return original(self, region, start, length, staging)

        monkeypatch.setattr(DiskStore, method, counting)
    outcome = run(family, UNIFORM, policy, "bfloat16", hardware=hardware, disk_dir=tmp_path)
    on_disk = [op for op in outcome.ops if op.kind in DISK]
    assert on_disk
    for op, length in zip(on_disk, asked, strict=True):
        tokens = max(1, op.stop - op.start)
        # A share that cuts a row between two elements is rounded to one: half an element a token.
        assert abs(length - nbytes(op, model, outcome.placement)) <= tokens * 1 + 1
