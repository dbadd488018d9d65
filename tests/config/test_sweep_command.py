"""Sweeps as a user starts them: in another process and folder, killed, resumed, elsewhere."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sim.sweep_folder import FolderLock

ROOT = Path(__file__).parents[2]
SMALL = ("model=tiny", "workload=fixed", "workload.batch_size=1", "workload.prompt_len=32",
         "workload.gen_len=3", "trace=none", "engine=simpy")  # fmt: skip
GRID = "grid={policy: 'flexgen,tightllm', workload.n_batches: [1, -1]}"
ENV = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": "100",
       "PYTHONIOENCODING": "utf-8", "RAY_USAGE_STATS_ENABLED": "0"}  # fmt: skip


def command(*overrides: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "sim", "-m", *overrides)


def sweep(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """``python -m sim -m`` in ``folder``."""
    return subprocess.run(
        command(*overrides), cwd=folder, capture_output=True, text=True, timeout=600,
        env={**ENV, "HOME": str(folder)},
    )  # fmt: skip


def results(folder: Path) -> dict[str, dict]:
    """Rows of a sweep by run."""
    found = sorted(folder.glob("*/result.json")) + sorted(folder.glob("*/*/result.json"))
    return {str(p.parent.relative_to(folder)): json.loads(p.read_text()) for p in found}


def test_cells_of_a_job_are_rows_and_a_failed_one_stops_nothing(tmp_path):
    done = sweep(tmp_path, *SMALL, "workload.prompt_len=16,32", GRID, "hydra.sweep.dir=out")
    assert (done.returncode, done.stderr) == (1, "")
    rows = results(tmp_path / "out")
    assert sorted(rows) == sorted(f"{job}/{cell}" for job in range(2) for cell in range(4))
    assert [row["status"] for row in rows.values()] == ["ok", "failed"] * 4
    assert {row["reason"] for row in rows.values()} == {"", "workload.n_batches: -1 must be >= 1"}
    assert {(row["policy"], row["prompt_len"]) for row in rows.values() if row["prompt_len"]} == {
        (policy, n) for policy in ("flexgen", "tightllm") for n in (16, 32)
    }
    table = (tmp_path / "out" / "results.csv").read_text().splitlines()
    assert len(table) == 9
    assert table[1].startswith("0/0,")
    other = sweep(tmp_path, *SMALL, "grid={policy: 'flexgen,nope'}", "hydra.sweep.dir=other")
    assert other.returncode == 1
    assert [row["policy"] for row in results(tmp_path / "other").values()] == ["flexgen", "nope"]
    again = sweep(tmp_path, *SMALL, "hydra.sweep.dir=out")
    assert again.returncode == 2
    assert again.stderr.startswith("error: out: holds a sweep already; sweep.resume=out")


def test_a_killed_sweep_loses_the_run_in_flight_and_is_finished(tmp_path):
    overrides = ("model=tiny", "workload=extraction", "workload.limit=20", "workload.max_new=4",
                 "engine=simpy", "trace=none", "grid={seed: 'range(0,40)'}",
                 "~hydra.callbacks.aggregate")  # fmt: skip
    out = tmp_path / "out"
    running = subprocess.Popen(
        command(*overrides, f"hydra.sweep.dir={out}"), cwd=tmp_path, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env={**ENV, "HOME": str(tmp_path)},
    )  # fmt: skip
    deadline = time.monotonic() + 600
    while len(list(out.glob("0/*/result.json"))) < 3:
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    before = {path: path.stat().st_mtime_ns for path in out.glob("0/*/result.json")}
    assert 3 <= len(before) < 40, "the sweep was over before it was killed"
    for path in before:
        assert json.loads(path.read_text())["status"] == "ok"  # whole
    done = sweep(tmp_path, *overrides, f"sweep.resume={out}")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 40 - len(before)
    rows = results(out)
    assert {row["seed"] for row in rows.values()} == set(range(40))
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not list(out.rglob("*.part"))


def test_resuming_runs_again_what_is_no_longer_the_same(tmp_path):
    (tmp_path / "lengths.csv").write_text("prompt_tokens,response_tokens\n16,3\n")
    overrides = ("model=tiny", "workload.path=lengths.csv", "workload.n_batches=1,2",
                 "engine=simpy", "trace=none", "~hydra.callbacks.aggregate")  # fmt: skip
    assert sweep(tmp_path, *overrides, "hydra.sweep.dir=out").returncode == 0
    other = sweep(tmp_path, *overrides, "seed=1", "sweep.resume=out")
    assert other.returncode == 2
    assert "holds another sweep, overrides" in other.stderr
    (first,) = {row["prompt_len"] for row in results(tmp_path / "out").values()}
    (tmp_path / "lengths.csv").write_text("prompt_tokens,response_tokens\n26,3\n")
    done = sweep(tmp_path, *overrides, "sweep.resume=out")
    assert [line.partition(" ")[0] for line in done.stdout.splitlines()] == ["#0", "#1"]
    assert {row["prompt_len"] for row in results(tmp_path / "out").values()} == {first + 10}


def test_two_sweeps_into_one_folder_are_refused(tmp_path):
    lock = FolderLock(tmp_path / "out")
    done = sweep(tmp_path, *SMALL, "hydra.sweep.dir=out")
    lock.release()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: out: process {os.getpid()} on ")
    assert not (tmp_path / "out" / "0").exists()


def test_a_grid_alone_needs_a_sweep(tmp_path):
    done = subprocess.run(
        (sys.executable, "-m", "sim", *SMALL, "+grid.seed=1"), cwd=tmp_path, text=True,
        capture_output=True, env={**ENV, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "error: grid: needs a sweep, add -m\n")


def test_a_launcher_that_is_not_installed_says_what_brings_it(tmp_path):
    done = sweep(tmp_path, *SMALL, "hydra/launcher=spark")
    assert done.returncode == 2
    assert "extras [joblib], [ray] and [slurm] bring more" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "plugin", "more"),
    [
        ("joblib", "hydra_joblib_launcher", ("hydra.launcher.n_jobs=2",)),
        ("submitit_local", "hydra_submitit_launcher", ()),
        ("ray_local", "hydra_ray_launcher", ("hydra.launcher.ray.init.num_cpus=2",)),
    ],
)
def test_other_launchers_give_the_same_rows(tmp_path, launcher, plugin, more):
    pytest.importorskip(f"hydra_plugins.{plugin}", reason=f"needs the extra that has {plugin}")
    done = sweep(tmp_path, *SMALL, "workload.prompt_len=16,32", GRID, "hydra.sweep.dir=out",
                 f"hydra/launcher={launcher}", *more)  # fmt: skip
    assert done.returncode == 1, done.stderr  # two cells fail, and that is known here too
    rows = results(tmp_path / "out")
    assert [row["status"] for row in rows.values()] == ["ok", "failed"] * 4
    assert {row["prompt_len"] for row in rows.values()} == {16, 32, None}
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 9
    assert "sweep: 8 runs" in done.stdout
