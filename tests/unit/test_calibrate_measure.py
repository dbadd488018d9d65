"""Records, grids and the measurement itself, on the CPU with a tiny grid."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from calibrate import __main__ as command
from calibrate import bench_compute
from calibrate.bench import Bench
from calibrate.drift import Drifted, handful, judge
from calibrate.grid import GROUPS, Needs, cases, make_plan, needs, select
from calibrate.presets import FULL, PRESETS, SMALL, TINY, Preset
from calibrate.profile import fit_profile, read_profile
from calibrate.record import Machine, Point, dump_point, parse_point, read_points, write_points
from policies.spec.curve import Curve
from policies.spec.factors import with_factors
from policies.spec.hardware import Link, Provenance
from policies.spec.model import ModelSpec
from policies.tightllm import TightLLM
from tests.unit.test_calibrate_fit import HERE, TRUTH, synthetic

PACKAGE = Path(command.__file__).parent


# ---- records ----------------------------------------------------------------------------------


def test_a_point_survives_the_file(tmp_path: Path) -> None:
    points = tuple(synthetic(TRUTH, 0.1))
    write_points(points, tmp_path / "points.jsonl")
    assert read_points(tmp_path / "points.jsonl") == points


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 9}, "schema"),
        ({"seconds": ["fast"]}, "seconds"),
        ({"seconds": [-1.0]}, "seconds"),
        ({"extra": 1}, "extra"),
        ({"machine": {}}, "machine"),
        ({"seconds": []}, "no seconds"),
        ({"x": {"rows": True}}, "x.rows"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, object], message: str) -> None:
    point = next(p for p in synthetic(TRUTH) if p.group == "h2d")
    record = json.loads(dump_point(point)) | change
    with pytest.raises(ValueError, match=message):
        parse_point(json.dumps(record))


def test_a_corrupt_line_is_named_and_a_cut_one_is_no_point(tmp_path: Path) -> None:
    points = tuple(synthetic(TRUTH))[:3]
    path = tmp_path / "points.jsonl"
    write_points(points, path)
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole + '{"schema":1,"gro', encoding="utf-8")
    assert read_points(path) == points
    path.write_text(whole.replace('"x":', '"y":', 1), encoding="utf-8")
    with pytest.raises(ValueError, match=r"points\.jsonl:1: .*fields"):
        read_points(path)


# ---- grids ------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_fit_and_held_out_points_are_disjoint(preset: Preset) -> None:
    planned = cases(preset)
    assert len({case.name for case in planned}) == len(planned)
    assert {case.group for case in planned} == set(GROUPS)
    held = [case for case in planned if not case.fit]
    fitted = {(c.group, tuple(c.x.values())) for c in planned if c.fit}
    assert held
    assert not fitted & {(c.group, tuple(c.x.values())) for c in held}


def test_order_is_shuffled_by_seed_and_coarse_points_come_first() -> None:
    first, again, other = (make_plan(FULL, seed=s).cases for s in (0, 0, 1))
    assert first == again != other
    priorities = [case.priority for case in first]
    assert priorities == sorted(priorities)
    rows = [case.x["rows"] for case in first if case.group == "gemm"]
    assert rows != sorted(rows)
    coarse = {case.group for case in first if case.priority == 0 and case.fit}
    assert coarse >= set(GROUPS) - {"memory", "power", "elementwise"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("measure", "--device", "cpu", "--threads", 0, "--out", "x.jsonl"), "threads: 0 must"),
        (("fit", "points.jsonl", "--name", "../x"), "name: '../x' must match"),
        (("fit", "points.jsonl", "--name", ""), "name: '' must match"),
        (("fit", "none.jsonl", "--name", "x"), "calibrate fit: none.jsonl: No such file"),
        (
            ("fit", "none.jsonl", "--name", "h200", "--out", "own"),
            "name: 'h200' is that of a shipped profile",
        ),
        (("measure", "--disk-dir", "none", "--out", "x.jsonl"), "disk-dir: none is not a folder"),
        (("drift", "h200", "--disk-dir", "none"), "disk-dir: none is not a folder"),
        (("drift", "none.yaml", "--device", "cpu"), "calibrate drift: none.yaml: No such file"),
        (("drift", "none", "--device", "cpu"), "calibrate drift: profile: 'none' is no YAML file"),
    ],
)
def test_bad_arguments_are_named(
    words: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_two_machines_is_refused(tmp_path: Path) -> None:
    (point,) = [p for p in synthetic(TRUTH) if p.group == "launch"]
    other = replace(point, machine=replace(HERE, device="Other GPU"))
    write_points((point, other), tmp_path / "points.jsonl")
    with pytest.raises(ValueError, match="launch is of Other GPU, an earlier line of Test GPU"):
        read_points(tmp_path / "points.jsonl")


def test_only_takes_sections_and_groups() -> None:
    chosen = {case.group for case in select(cases(TINY), ["disk", "gemm"])}
    assert chosen == {"disk_read", "disk_write", "gemm"}
    with pytest.raises(ValueError, match=r"only: 'gpu' is none of links"):
        select(cases(TINY), ["gpu"])


def test_memory_guard_says_what_is_missing() -> None:
    largest = max((needs(case, FULL) for case in cases(FULL)), key=lambda n: n.device_bytes)
    assert largest.device_bytes < 20e9  # the full grid is meant for a card of 24 GB
    assert largest.missing(Needs(1e9, 1e12, 1e12)).startswith("needs")
    assert not largest.missing(Needs(20e9, 1e12, 1e12))


# ---- measuring --------------------------------------------------------------------------------


def run(*args: object) -> int:
    return command.main([str(arg) for arg in args])


MEASURE = ("measure", "--device", "cpu", "--grid", "tiny", "--threads", "1", "--out")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured") / "cpu.jsonl"
    assert run(*MEASURE, path) == 0
    return path


def test_every_planned_point_is_taken(measured: Path) -> None:
    points = {p.name: p for p in read_points(measured)}
    assert set(points) == {case.name for case in cases(TINY)}
    timed = [p for p in points.values() if p.group not in ("memory", "power")]
    assert not [p.name for p in timed if p.skipped]
    assert all(len(p.seconds) >= 3 for p in timed if p.group not in ("duplex_h2d", "duplex_d2h"))
    assert not list(measured.parent.glob(".calibrate-*"))  # the scratch file is gone


def test_larger_work_takes_longer(measured: Path) -> None:
    """No constant could pass for a measurement: sizes that differ 16-fold show in the times."""
    points = {p.name: p for p in read_points(measured)}
    for group in ("h2d", "host_copy"):
        sizes = sorted(
            (p.x["nbytes"], min(p.seconds)) for p in points.values() if p.group == group and p.fit
        )
        assert sizes[-1][1] > 2 * sizes[0][1]


def test_a_rerun_takes_only_what_is_missing(measured: Path, tmp_path: Path) -> None:
    whole = measured.read_text(encoding="utf-8").splitlines(keepends=True)
    lacking = [line for line in whole if '"group":"gemm"' not in line]
    path = tmp_path / "cpu.jsonl"
    path.write_text("".join(lacking) + whole[-1][:30], encoding="utf-8")
    assert run(*MEASURE, path, "--only", "gemm,links") == 0
    after = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert after[: len(lacking)] == lacking
    assert all('"group":"gemm"' in line for line in after[len(lacking) :])
    assert {p.name for p in read_points(path)} == {case.name for case in cases(TINY)}


def test_a_budget_that_is_spent_leaves_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "cpu.jsonl"
    assert run(*MEASURE, path, "--budget-s", "0.001") == 0
    assert len(read_points(path)) < len(cases(TINY))


def test_another_devices_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.jsonl"
    write_points(tuple(synthetic(TRUTH))[:4], path)
    assert run(*MEASURE, path) == 2
    assert "Test GPU" in " ".join(capsys.readouterr().err.split())
    assert len(read_points(path)) == 4


def test_measured_points_become_a_profile_that_the_simulator_runs(
    measured: Path, tmp_path: Path
) -> None:
    from sim.job import WorkloadSpec
    from sim.run import RunSpec, simulate

    folder = tmp_path / "conf" / "hardware"
    assert run("fit", measured, "--name", "my-cpu", "--out", folder) == 0
    assert measured.with_suffix(".fit.png").stat().st_size > 10_000
    profile = read_profile(folder / "my-cpu.yaml")
    model = ModelSpec("m", 2, 64, 4, 4, 16, 256, 512, 2048, False, True)
    job = WorkloadSpec("job", "fixed", 2, 4, prompt_len=64, gen_len=4)
    result = simulate(RunSpec(model, profile, TightLLM(), job))
    assert result.record.status == "ok"
    assert result.record.makespan_s is not None
    assert result.record.makespan_s > 0


# ---- drift ------------------------------------------------------------------------------------


# ---- timers -----------------------------------------------------------------------------------


def bench(device: str) -> Bench:
    return Bench(device, None, seed=0, min_s=1e-4, n_repeats=3, heat_s=0.0)


def test_an_arena_is_kept_until_more_is_asked_for() -> None:
    memory = bench("cpu")
    small = memory.arena("pageable", 2**20)
    assert memory.arena("pageable", 2**19) is small
    assert len(set(small[: 2**16].tolist())) == 256  # filled: pages of zeros are one page
    assert memory.arena("pageable", 2**22).numel() == 2**22
    assert memory.held_bytes("pageable") == 2**22
    memory.close()
    assert memory.held_bytes("pageable") == 0


def test_what_is_timed_again_and_again_does_not_fade_to_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Operands of calls that change them keep their scale."""
    kept = []
    monkeypatch.setattr(Bench, "amid_gemms", lambda _self, call: [call(i) for i in range(20)])
    real = Bench.random
    monkeypatch.setattr(Bench, "random", lambda self, *n: kept.append(real(self, *n)) or kept[-1])
    x = {"rows": 64, "n_heads": 4, "head_dim": 32, "d_model": 128, "d_ffn": 512, "elem_bytes": 4}
    bench_compute.rotary(bench("cpu"), x)
    bench_compute.elementwise(bench("cpu"), x)
    assert len(kept) > 5
    assert all(0.01 < float(operand.std()) < 0.2 for operand in kept)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_timers_beside_other_work_on_a_gpu() -> None:
    device = bench("cuda")
    x = {"rows": 4096, "d_model": 4096, "elem_bytes": 2}
    alone = device.kernel(lambda _: None)
    amid = bench_compute.norm(device, "layer_norm", x)
    assert len(amid) == device.n_repeats
    assert max(alone) < min(amid) < 1e-3
    source, target = device.arena("pageable", 2**26), device.arena("pinned", 2**26)
    copies = device.beside_h2d(lambda _: target.copy_(source))
    assert len(copies) >= device.n_repeats
    assert all(2**26 / 1e12 < seconds < 1.0 for seconds in copies)
    device.close()


@pytest.mark.parametrize("preset", [FULL, SMALL, TINY])
def test_a_handful_has_every_number(preset: Preset) -> None:
    few = list(handful(preset))
    assert {case.group for case in few} == {
        case.group for case in cases(preset) if case.fit and case.group not in ("memory", "power")
    }
    assert len(few) < len(cases(preset))


def test_drift_names_the_number_that_changed() -> None:
    profile = fit_profile(tuple(synthetic(TRUTH)), "mine").hardware
    slower = replace(TRUTH, h2d=Link(TRUTH.h2d.latency_s, 0.8 * TRUTH.h2d.bytes_per_s))
    same = judge(profile, tuple(synthetic(TRUTH)), HERE)
    assert not same.drifted
    assert not same.warning
    report = judge(profile, tuple(synthetic(slower)), HERE)
    drifted = {n.field: n.off for n in report.numbers if n.drifted}
    # Duplex is measured in copies, so a slower link shows there too.
    assert set(drifted) == {"h2d", "duplex"}
    assert drifted["h2d"] == pytest.approx(-0.25, abs=0.02)  # a copy takes 1 / 0.8
    noisy = [
        replace(p, seconds=(0.7 * p.median_s, p.median_s, 1.3 * p.median_s))
        for p in synthetic(slower)
        if p.seconds
    ]
    assert not judge(profile, noisy, HERE).drifted


def test_tolerance_is_twice_the_residual_and_at_least_five_per_cent() -> None:
    profile = fit_profile(tuple(synthetic(TRUTH)), "mine").hardware
    source = replace(profile.provenance["gemm"], residual=0.04)
    loose = replace(profile, provenance={**profile.provenance, "gemm": source})
    gemm = TRUTH.gemm
    slower = replace(TRUTH, gemm=Curve(gemm.x, tuple(0.935 * y for y in gemm.y)))
    points = [p for p in synthetic(slower) if p.group == "gemm"]
    assert judge(profile, points, HERE).drifted
    assert not judge(loose, points, HERE).drifted


def test_half_as_fast_is_drift_whatever_the_fit_left() -> None:
    for off in (-1.5, 1.5):  # the profile is too quick, too slow
        assert Drifted("gemm", 1, off, tolerance=0.5).drifted
    poor = Provenance("measured", "a poor fit", residual=17.0)
    names = [f.name for f in fields(TRUTH) if f.name not in ("name", "provenance")]
    profile = replace(TRUTH, provenance=dict.fromkeys(names, poor))
    points = tuple(synthetic(with_factors(TRUTH, {"gemm": 0.4})))
    found = {n.field: n for n in judge(profile, points, HERE).numbers}
    assert found["gemm"].drifted
    assert not found["h2d"].drifted


def test_another_device_is_warned_of() -> None:
    profile = fit_profile(tuple(synthetic(TRUTH)), "mine").hardware
    other = Machine("Other GPU")
    points = [replace(p, machine=other) for p in synthetic(TRUTH)]
    report = judge(profile, points, other)
    assert "Test GPU" in report.warning
    assert not report.drifted


def test_drift_command_measures_this_machine(measured: Path, tmp_path: Path) -> None:
    assert run("fit", measured, "--name", "cpu", "--out", tmp_path) == 0
    path = tmp_path / "cpu.yaml"
    text = path.read_text(encoding="utf-8")
    profile = read_profile(path)
    gemm = f"{profile.gemm.y[-1]}"
    assert text.count(gemm) == 1
    path.write_text(text.replace(gemm, f"{100 * profile.gemm.y[-1]}"), encoding="utf-8")
    assert run("drift", path, "--device", "cpu", "--grid", "tiny", "--threads", "1") == 1


# ---- imports ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_heavy_packages_are_imported_only_inside_functions(path: Path) -> None:
    """Importing calibrate must not need torch, the simulator, the engine or a plotting library."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = []
    for node in body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    heavy = {"torch", "sim", "real", "matplotlib", "pandas", "simpy", "hydra"}
    assert not heavy & {name.split(".")[0] for name in names}


def test_a_skipped_point_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="reason to be skipped"):
        Point("gemm", "gemm", {}, (), True, HERE, "now")


def test_a_bare_gpu_machine_is_enough_to_measure_fit_and_check() -> None:
    """No package of the simulator is needed; a plotting library only once a figure is drawn."""
    absent = ("simpy", "hydra", "pandas", "pyarrow", "gurobipy", "numba", "matplotlib", "sim")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
    code += "import calibrate.__main__, calibrate.measure, calibrate.drift, calibrate.profile"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
