"""Comparing a simulated trace with itself gives zero; a known distortion comes out as itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from calibrate import __main__ as command
from calibrate.compare import compare, decode_bound
from calibrate.devices import device_warning
from calibrate.replay import DECISIONS, REQUEST, RESULT, TRACE, replay
from calibrate.report import Tolerance, make_report, write_report
from calibrate.report_text import markdown
from policies.accelerate import Accelerate
from policies.drive import Policy
from policies.plan.op import Kind, Lane
from policies.run_request import RunRequest
from policies.spec.hardware import HardwareProfile, Link, Provenance
from policies.spec.workload import Batch, Block
from policies.tightllm import TightLLM
from policies.trace.decisions import write_decisions
from policies.trace.jsonl import write_jsonl
from policies.trace.span import Span, Trace, parse_key
from tests.policies_table import OPT, SMALL

ZERO = Tolerance(0.0, 0.0)
BLOCKS = (Block(0, (Batch(16, 200), Batch(8, 120)), 4), Block(1, (Batch(4, 64),), 3))


def request(name: str = "job", policy: Policy | None = None, **more: object) -> RunRequest:
    chosen = policy or TightLLM(solver="dp")
    return RunRequest(name, OPT, SMALL, chosen, BLOCKS, **more)  # type: ignore[arg-type]


def write_run(
    folder: Path,
    what: RunRequest,
    machine: HardwareProfile = SMALL,
    change: Callable[[Span], Span] = lambda span: span,
) -> None:
    """A run folder as the engine writes it, out of a simulation on ``machine``."""
    folder.mkdir(parents=True)
    run = replay(what, machine)
    (folder / REQUEST).write_text(what.to_json(), encoding="utf-8")
    write_jsonl((change(span) for span in run.trace.spans), folder / TRACE)
    write_decisions(run.decisions, folder / DECISIONS)
    result = {"status": "ok", "device": "Test GPU"}
    (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")


def test_a_simulation_compared_with_itself_is_exactly_zero(tmp_path: Path) -> None:
    for policy in (TightLLM(solver="dp"), Accelerate()):
        write_run(tmp_path / policy.name, request(policy.name, policy))
    report = make_report(tmp_path, SMALL, ZERO, ZERO)
    assert report.passed
    assert len(report.runs) == 2
    for run in report.runs:
        c = run.comparison
        assert c.same_plan
        assert not run.decisions_differ
        assert all(t.error == 0.0 for t in (*run.cells, *c.steps, c.makespan))
        assert all(
            g.bias == g.mape == g.worst_error == 0.0 for g in (*c.kinds, *c.phases, *c.lanes)
        )
    assert {run.memory for run in report.runs} == {"pinned", "pageable"}


def test_a_closed_loop_is_simulated_as_late_as_its_plans_came(tmp_path: Path) -> None:
    late_s = [0.0, 0.5, 0.0, 0.25]  # the third and the fifth step after the first two
    waits = {(0, 3): 0.5, (1, 0): 0.5, (1, 1): 0.75, (1, 2): 0.75}

    def later(span: Span) -> Span:
        key = parse_key(span.key)
        more_s = waits.get((key.block, key.step), 0.0)
        return span._replace(start_s=span.start_s + more_s, end_s=span.end_s + more_s)

    write_run(tmp_path / "run", request(policy=TightLLM(solver="dp", feedback=True)), change=later)
    result = {"status": "ok", "device": "Test GPU", "feedback_late_s": late_s}
    (tmp_path / "run" / RESULT).write_text(json.dumps(result), encoding="utf-8")
    run = make_report(tmp_path, SMALL, ZERO, ZERO).runs[0]
    assert run.closed_loop
    assert [t.error for t in run.comparison.steps] == pytest.approx([0.0] * 7, abs=1e-9)
    assert run.comparison.makespan.sim_s > 0.75


def test_a_run_that_did_not_end_is_left_out(tmp_path: Path) -> None:
    for name in ("r0", "r1", "r2"):
        write_run(tmp_path / name, request())
    lines = (tmp_path / "r1" / TRACE).read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "r1" / TRACE).write_text("".join(lines[:5]), encoding="utf-8")
    (tmp_path / "r2" / RESULT).unlink()
    report = make_report(tmp_path, SMALL, ZERO, ZERO)
    assert [run.comparison.n_repeats for run in report.runs] == [1]
    reasons = {u.folder.name: u.reason for u in report.unusable}
    assert reasons == {"r1": f"has 5 ops, a repeat of it {len(lines)}: cut?",
                       "r2": "has no result.json"}  # fmt: skip
    assert "Every plan and every decision is the same" in markdown(report)


def test_slower_loads_show_up_as_exactly_that(tmp_path: Path) -> None:
    """A machine whose H2D copies take 10 % longer: only H2D ops differ, and by that."""
    slower = replace(SMALL, h2d=Link(SMALL.h2d.latency_s * 1.1, SMALL.h2d.bytes_per_s / 1.1))
    write_run(tmp_path / "run", request(), slower)
    report = make_report(tmp_path, SMALL, Tolerance(0.05, 0.05), ZERO)
    c = report.runs[0].comparison
    lanes = {g.name: g for g in c.lanes}
    assert lanes["h2d"].bias == pytest.approx(1 / 1.1 - 1)
    assert lanes["h2d"].mape == pytest.approx(1 - 1 / 1.1)
    assert lanes["h2d"].median_ratio == pytest.approx(1 / 1.1)
    for lane in set(lanes) - {"h2d"}:
        assert lanes[lane].mape == pytest.approx(0.0, abs=1e-9)
    assert {k.lane for k in c.carriers} == {"h2d"}
    assert 1 / 1.1 - 1 < c.makespan.error < -0.05  # the run waits mostly, not only, for loads
    assert not report.passed
    text = (write_report(report, tmp_path / "out")[1]).read_text(encoding="utf-8")
    assert "What carries the errors" in text
    assert c.carriers[0].key in text


def test_repeats_are_one_request_with_a_spread(tmp_path: Path) -> None:
    def scaled(factor: float) -> Callable[[Span], Span]:
        return lambda s: s._replace(start_s=factor * s.start_s, end_s=factor * s.end_s)

    for i, factor in enumerate((0.98, 1.0, 1.04)):
        write_run(tmp_path / f"r{i}", request(), change=scaled(factor))
    (run,) = make_report(tmp_path, SMALL, ZERO, ZERO).runs
    assert run.comparison.n_repeats == 3
    assert run.comparison.prefill.error == 0.0  # the median repeat
    assert run.comparison.prefill.spread == pytest.approx(0.06)


def test_other_plans_and_decisions_are_reported(tmp_path: Path) -> None:
    write_run(tmp_path / "run", request())
    path = tmp_path / "run" / DECISIONS
    lines = path.read_text(encoding="utf-8").splitlines()
    cells = lines[5].split(",")
    lines[5] = ",".join([*cells[:4], "77", *cells[5:]])
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    trace = tmp_path / "run" / TRACE
    spans = trace.read_text(encoding="utf-8").splitlines()
    dropped = next(i for i, line in enumerate(spans) if '"load_weight"' in line)
    key = json.loads(spans.pop(dropped))["key"]
    trace.write_text("\n".join(spans) + "\n", encoding="utf-8")
    report = make_report(tmp_path, SMALL, Tolerance(1, 1), ZERO)
    (run,) = report.runs
    assert run.comparison.only_sim == (key,)
    assert "'n_recompute': 77" in run.decisions_differ
    assert not report.passed
    text = markdown(report)
    assert "other decisions than the simulated ones: 2 of 2." in text
    assert "## Plans or decisions that differ" in text
    assert "## Runs left out" not in text


def test_a_cut_run_is_compared_over_its_steps(tmp_path: Path) -> None:
    write_run(tmp_path / "run", request(steps_run=1))
    report = make_report(tmp_path, SMALL, ZERO, ZERO)
    assert report.passed
    assert [t.name for t in report.runs[0].comparison.steps] == ["g0/s0", "g0/s1", "g1/s0", "g1/s1"]


def test_the_belief_decides_and_the_named_profile_charges(tmp_path: Path) -> None:
    quick = replace(SMALL, h2d=Link(1e-6, 1e12))
    believed = replay(request(), SMALL)
    charged = replay(request(), quick)
    assert believed.decisions == charged.decisions
    assert charged.trace.makespan_s < believed.trace.makespan_s


def test_decode_bound_is_the_step_time_over_its_longest_lane() -> None:
    def span(kind: Kind, lane: Lane, step: int, start: float, end: float) -> Span:
        return Span(f"{kind.value}/g0/s{step}/l0/b0/p0", kind, lane, start, end, 0, 0.0)

    trace = Trace(
        (
            span(Kind.FORWARD, Lane.COMPUTE, 0, 0.0, 1.0),
            span(Kind.LOAD_KV, Lane.H2D, 1, 0.5, 2.5),  # 1.5 s of it in decode
            span(Kind.FORWARD, Lane.COMPUTE, 1, 2.5, 3.0),
        )
    )
    bound = decode_bound(trace)
    assert bound is not None
    assert (bound.ratio, bound.lane) == (pytest.approx(2.0 / 1.5), "h2d")


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder with a request"):
        make_report(tmp_path, SMALL, ZERO, ZERO)
    write_run(tmp_path / "run", request())
    (tmp_path / "run" / RESULT).write_text('{"status": "oom", "reason": "gpu"}', encoding="utf-8")
    report = make_report(tmp_path, SMALL, ZERO, ZERO)
    assert not report.passed
    assert report.unusable[0].reason == "result.json says oom: gpu"
    write_run(tmp_path / "cut", request())
    (tmp_path / "cut" / TRACE).write_bytes(b"")
    left_out = {u.folder.name: u.reason for u in make_report(tmp_path, SMALL, ZERO, ZERO).unusable}
    assert left_out["cut"] == "trace.jsonl is empty"
    (tmp_path / "cut" / TRACE).write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"cut/trace\.jsonl:1: 'utf-8' codec"):
        make_report(tmp_path, SMALL, ZERO, ZERO)
    shutil.rmtree(tmp_path / "cut")
    (tmp_path / "run" / RESULT).write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"result\.json"):
        make_report(tmp_path, SMALL, ZERO, ZERO)
    with pytest.raises(ValueError, match="no measured run"):
        compare([], Trace(()))


def test_compare_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from calibrate.profile import fit_profile, write_profile
    from tests.unit.test_calibrate_fit import TRUTH, synthetic

    fitted = fit_profile(tuple(synthetic(TRUTH)), "mine")
    path = write_profile(fitted, tmp_path)
    write_run(tmp_path / "traces" / "a", request(), fitted.hardware)
    arguments = ["compare", str(tmp_path / "traces"), "--name", str(path)]
    assert command.main(arguments) == 0
    out = tmp_path / "traces" / "report-mine"
    assert {p.name for p in out.iterdir()} == {
        "report.json", "report.md", "sim_against_real.png", "error_by_kind.png",
    }  # fmt: skip
    data = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert data["passed"]
    assert data["runs"][0]["decisions_equal"]
    assert data["warning"] == ""
    printed = capsys.readouterr().out
    assert "Passed" in printed
    assert "warning" not in printed


def test_runs_of_another_device_are_warned_of(tmp_path: Path) -> None:
    def measured_on(*devices: str) -> HardwareProfile:
        sources = (Provenance("measured", "here", device=device) for device in devices)
        guessed = Provenance("imported", "elsewhere", device="Test GPU")
        names = [f.name for f in fields(SMALL) if f.name not in ("name", "provenance")]
        provenance = dict.fromkeys(names, guessed) | dict(zip(names, sources, strict=False))
        return replace(SMALL, provenance=provenance)

    assert device_warning(measured_on("Test GPU"), ("Test GPU",), "this is") == ""
    write_run(tmp_path / "run", request(policy=Accelerate()))
    for devices, word in ((("Other",), "on Other,"), (("Other", "Test GPU"), "on Other, Test GPU,"),
                          ((), "names no device")):  # fmt: skip
        report = make_report(tmp_path, measured_on(*devices), ZERO, ZERO)
        assert word in report.warning
        assert "the runs are of Test GPU" in report.warning
        assert f"**Warning**: {report.warning}." in markdown(report)
    (tmp_path / "run" / RESULT).write_text("{}", encoding="utf-8")
    report = make_report(tmp_path, measured_on("Test GPU"), ZERO, ZERO)
    assert "the runs are of a device without a name" in report.warning
