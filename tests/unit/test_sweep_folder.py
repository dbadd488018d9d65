"""One sweep a folder: who holds it, what it holds, how far it is; and the bar that says so."""

import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from sim.guard import Bar, Guard, Progress, SweepFailed, SweepRefused, count_jobs, progress_text
from sim.sweep import Resume, read_resume
from sim.sweep_folder import LOCK, FolderLock, RowCount, open_sweep, read_manifest

SWEEP = {"overrides": ["seed=1,2"], "n_runs": 2}


def row(folder: Path, status: str = "ok", **more) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps({"status": status, **more}))


class TestLock:
    def test_the_second_is_told_who_has_it(self, tmp_path):
        lock = FolderLock(tmp_path)
        with pytest.raises(ValueError, match=f"process {os.getpid()} on .* is writing a sweep"):
            FolderLock(tmp_path)
        lock.release()
        assert not (tmp_path / LOCK).exists()
        FolderLock(tmp_path).release()

    def test_what_a_killed_sweep_leaves_locks_nobody_out(self, tmp_path):
        code = (
            "import os, sys; from pathlib import Path; from sim.sweep_folder import FolderLock; "
            "FolderLock(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2]
        )
        assert done.returncode == -9
        assert "process" in (tmp_path / LOCK).read_text()
        FolderLock(tmp_path).release()

    def test_a_number_that_lives_is_no_lock(self, tmp_path):
        (tmp_path / LOCK).write_text(f"process {os.getpid()} on elsewhere\n")
        FolderLock(tmp_path).release()


class TestManifest:
    def test_a_folder_with_a_sweep_is_not_written_into_unasked(self, tmp_path):
        open_sweep(tmp_path, SWEEP, resume=False)
        assert read_manifest(tmp_path) == SWEEP
        with pytest.raises(ValueError, match=r"holds a sweep already; sweep\.resume="):
            open_sweep(tmp_path, SWEEP, resume=False)

    def test_nor_one_with_rows_only(self, tmp_path):
        row(tmp_path / "0")
        with pytest.raises(ValueError, match="holds a sweep already"):
            open_sweep(tmp_path, SWEEP, resume=False)

    def test_only_the_same_sweep_is_resumed(self, tmp_path):
        with pytest.raises(ValueError, match="holds no sweep"):
            open_sweep(tmp_path, SWEEP, resume=True)
        open_sweep(tmp_path, SWEEP, resume=False)
        open_sweep(tmp_path, SWEEP, resume=True)
        with pytest.raises(ValueError, match="overrides seed=1,2 and not seed=3"):
            open_sweep(tmp_path, {**SWEEP, "overrides": ["seed=3"]}, resume=True)


class TestRows:
    def test_rows_of_jobs_and_of_cells_each_once(self, tmp_path):
        row(tmp_path / "0")
        row(tmp_path / "1" / "0", "failed")
        row(tmp_path / "1" / "1", "oom")
        row(tmp_path / ".submitit" / "7")
        (tmp_path / "2").mkdir()
        count = RowCount(tmp_path)
        assert count() == (3, 1)
        row(tmp_path / "2" / "0", "failed")
        (tmp_path / "1" / "2").mkdir()
        (tmp_path / "1" / "2" / "result.json").write_text('{"status": "o')  # no whole row
        assert count() == (4, 2)

    def test_a_row_that_is_run_again_is_read_again(self, tmp_path):
        row(tmp_path / "0", "failed")
        count = RowCount(tmp_path)
        assert count() == (1, 1)
        row(tmp_path / "0", "ok")
        os.utime(tmp_path / "0" / "result.json", ns=(1, 1))
        assert count() == (1, 0)


class TestResume:
    def test_keeps_only_whole_rows_of_the_same_cell(self, tmp_path):
        row(tmp_path, provenance={"cell_sha256": "a"})
        assert Resume(active=True).keeps(tmp_path, "a")
        assert not Resume(active=True).keeps(tmp_path, "b")
        assert not Resume(active=False).keeps(tmp_path, "a")
        assert not Resume(active=True).keeps(tmp_path / "none", "a")
        (tmp_path / "result.json").write_text("{")
        assert not Resume(active=True).keeps(tmp_path, "a")

    def test_failed_rows_are_rows_unless_asked(self, tmp_path):
        row(tmp_path, "failed", provenance={"cell_sha256": "a"})
        assert Resume(active=True).keeps(tmp_path, "a")
        assert not Resume(active=True, retry_failed=True).keeps(tmp_path, "a")

    def test_settings(self):
        assert read_resume({}) == read_resume({"sweep": {"resume": "???"}}) == Resume()
        asked = {"sweep": {"resume": "out", "retry_failed": True}}
        assert read_resume(asked) == Resume(active=True, retry_failed=True)
        for wrong, message in (
            ({"resume": ""}, "sweep.resume: '' must be the folder"),
            ({"retry_failed": 1}, "sweep.retry_failed: 1 must be true or false"),
            ({"redo": 1}, "sweep.redo: unknown key"),
        ):
            with pytest.raises(ValueError, match=message):
                read_resume({"sweep": wrong})


def config(folder: Path, **more):
    return OmegaConf.create(
        {
            "grid": {"seed": "range(0,3)"},
            "sweep": {"resume": "???", "retry_failed": False},
            "hydra": {
                "sweep": {"dir": str(folder)},
                "sweeper": {"params": {"policy": "a,b"}},
                "overrides": {"task": ["model=x,y", "trace=none"]},
            },
            **more,
        }
    )


class TestGuard:
    def test_takes_a_folder_once_and_lets_it_go(self, tmp_path):
        folder = tmp_path / "sweep"
        first = Guard()
        first.on_multirun_start(config(folder))
        assert read_manifest(folder)["n_runs"] == 12
        with pytest.raises(SweepRefused, match="is writing a sweep"):
            Guard().on_multirun_start(config(folder))
        row(folder / "0")
        first.on_multirun_end(config(folder))
        with pytest.raises(SweepRefused, match="holds a sweep already"):
            Guard().on_multirun_start(config(folder))

    def test_hydra_cannot_turn_a_refusal_into_a_warning(self):
        assert not issubclass(SweepRefused, Exception)
        assert not issubclass(SweepFailed, Exception)

    def test_a_failed_run_is_said_at_the_end(self, tmp_path):
        guard = Guard()
        guard.on_multirun_start(config(tmp_path / "sweep"))
        row(tmp_path / "sweep" / "1" / "0", "failed")
        with pytest.raises(SweepFailed, match="1 runs failed"):
            guard.on_multirun_end(config(tmp_path / "sweep"))

    def test_what_cannot_be_resumed_is_not_created(self, tmp_path):
        missing = tmp_path / "missing"
        asked = config(missing, sweep={"resume": str(missing), "retry_failed": False})
        with pytest.raises(SweepRefused, match="does not exist"):
            Guard().on_multirun_start(asked)
        assert not missing.exists()

    def test_a_grid_that_cannot_be_read_is_refused_before_anything_runs(self, tmp_path):
        with pytest.raises(SweepRefused, match=r"grid\.seed: is empty"):
            Guard().on_multirun_start(config(tmp_path, grid={"seed": []}))

    def test_copies_for_other_processes_hold_nothing(self, tmp_path):
        guard, progress = Guard(), Progress()
        guard.on_multirun_start(config(tmp_path / "sweep"))
        progress.on_multirun_start(config(tmp_path / "sweep"))
        assert pickle.loads(pickle.dumps(guard)).lock is None  # noqa: S301
        assert pickle.loads(pickle.dumps(progress)).bar is None  # noqa: S301
        guard.on_multirun_end(config(tmp_path / "sweep"))

    @pytest.mark.parametrize("word", ["grid.seed=1,2", "+grid.seed=choice(1,2)"])
    def test_a_grid_is_not_swept(self, word, tmp_path):
        varied = config(tmp_path / "sweep")
        varied.hydra.overrides.task.append(word)
        with pytest.raises(
            SweepRefused, match="cannot vary the grid itself, write seed="
        ) as caught:
            Guard().on_multirun_start(varied)
        assert str(caught.value).startswith(word)
        varied.hydra.overrides.task[-1] = "grid.seed='1,2'"  # one value, which names two
        guard = Guard()
        guard.on_multirun_start(varied)
        guard.on_multirun_end(varied)

    def test_jobs_are_counted_as_the_sweeper_counts_them(self):
        assert count_jobs(["policy=a,b", "seed=1,2,3", "trace=none"]) == 6
        assert count_jobs(["policy=a,b", "policy=c"]) == 1  # the command line narrows
        assert count_jobs(["seed=range(4)"]) == 4


class TestProgress:
    @pytest.mark.parametrize(
        ("state", "text"),
        [
            ((40, 0, 0, 0, 9.0), "0/40"),
            ((40, 12, 0, 0, 6.0), "12/40, 0:14 left"),
            ((40, 12, 1, 0, 6.0), "12/40, 1 failed, 0:14 left"),
            ((40, 12, 1, 10, 60.0), "12/40, 1 failed, 14:00 left"),  # 10 were there before
            ((9000, 1, 0, 0, 1.0), "1/9000, 2:29:59 left"),
        ],
    )
    def test_says_done_failed_and_time_left(self, state, text):
        assert progress_text(*state) == text

    def test_the_bar_counts_files_and_leaves_the_line_to_others(self, tmp_path):
        console = Console(file=io.StringIO(), force_terminal=True, width=80)
        row(tmp_path / "0")
        bar = Bar(4, RowCount(tmp_path), console)
        row(tmp_path / "1", "failed")
        bar.draw(3.0)
        drawn = console.file.getvalue()
        assert "2/4, 1 failed, 0:06 left" in drawn
        assert drawn.endswith("\r")
        bar.start()
        bar.stop()
        assert console.file.getvalue().endswith("\r\x1b[K")
