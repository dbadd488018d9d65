"""Hydra's callbacks around a sweep: the guard of its folder, and its progress bar.

They live in the process that starts the sweep; with some launchers copies of them travel to the
processes that run the jobs, where they do nothing. What readers get wrong: Hydra turns an exception
of a callback into a warning and goes on. What must stop a sweep is no ``Exception``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table

from sim.cells import expand
from sim.settings import explain
from sim.sweep import read_resume, without_sweep
from sim.sweep_folder import FolderLock, RowCount, open_sweep, read_manifest

_BAR_WIDTH = 24
_PERIOD_S = 0.5


class SweepRefused(BaseException):
    """A sweep that must not start."""


class SweepFailed(BaseException):
    """A sweep that ended, some of whose runs failed."""


class Guard(Callback):
    """Keeps two sweeps out of one folder and says at the end whether runs failed."""

    def __init__(self) -> None:
        self.lock: FolderLock | None = None

    def __getstate__(self) -> dict[str, object]:
        """Copies hold no lock."""
        return {"lock": None}

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Take the folder; ``SweepRefused`` where another sweep has it or is in it."""
        folder = Path(config.hydra.sweep.dir)
        try:
            plain = OmegaConf.to_container(config.get("sweep") or OmegaConf.create(), resolve=True)
            resume = read_resume({"sweep": plain})
            if resume.active and not folder.is_dir():
                what = "is not a folder" if folder.exists() else "does not exist"
                raise ValueError(f"sweep.resume: {folder} {what}")
            self.lock = FolderLock(folder)
            open_sweep(folder, _manifest(config), resume.active)
        except (ValueError, OSError) as error:
            self._release()
            raise SweepRefused(explain(error)) from error

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Let go of the folder; ``SweepFailed`` if a run failed."""
        self._release()
        _, n_failed = RowCount(Path(config.hydra.sweep.dir))()
        if n_failed:
            raise SweepFailed(f"{n_failed} runs failed")

    def _release(self) -> None:
        if self.lock is not None:
            self.lock.release()
            self.lock = None


def _manifest(config: DictConfig) -> dict[str, object]:
    words = list(config.hydra.overrides.task)
    _check_grid_is_not_swept(words)
    overrides = without_sweep(words)
    given = config.hydra.sweeper.get("params") or {}
    params = {str(key): str(value) for key, value in given.items()}
    grid = config.get("grid")
    plain = OmegaConf.to_container(grid, resolve=True) if OmegaConf.is_config(grid) else grid
    swept = [f"{key}={value}" for key, value in params.items()]
    n_runs = count_jobs([*swept, *overrides]) * len(expand(plain, overrides))
    return {"overrides": sorted(overrides), "params": params, "grid": plain, "n_runs": n_runs}


def _check_grid_is_not_swept(overrides: Sequence[str]) -> None:
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.get_key_element().lstrip("+")
        root, _, name = key.partition(".")
        if root == "grid" and override.is_sweep_override():
            _, _, values = str(override.input_line).partition("=")
            hint = f"write {name}={values}" if name else "name the keys that it is to vary"
            raise ValueError(f"{override.input_line}: cannot vary the grid itself, {hint}")


def count_jobs(overrides: Sequence[str]) -> int:
    """Jobs that Hydra's basic sweeper makes: the product of choices, of each key the last ones."""
    sizes: dict[str, int] = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        swept = override.is_sweep_override()
        sizes[override.get_key_element()] = (
            len(list(override.sweep_string_iterator())) if swept else 1
        )
    return prod(sizes.values())


# ---- progress ------------------------------------------------------------------------------------


class Progress(Callback):
    """A bar on the terminal while a sweep runs: ``12/40, 1 failed, 0:31 left``.

    Rows are counted in the sweep's folder, so it does not matter which process writes them.
    """

    def __init__(self) -> None:
        self.bar: Bar | None = None

    def __getstate__(self) -> dict[str, object]:
        """Copies draw no bar."""
        return {"bar": None}

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Start drawing, if there is a terminal."""
        folder = Path(config.hydra.sweep.dir)
        n_runs = (read_manifest(folder) or {}).get("n_runs")
        console = Console(stderr=True)
        if console.is_terminal and isinstance(n_runs, int):
            self.bar = Bar(n_runs, RowCount(folder), console)
            self.bar.start()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()


class Bar:
    """Draws a bar every ``_PERIOD_S`` and sets the cursor back to the start of its line.

    Whatever a run prints next overwrites it: runs and bar need not know of each other.
    """

    def __init__(self, n_runs: int, count: RowCount, console: Console) -> None:
        self.n_runs, self.count, self.console = n_runs, count, console
        self.n_before, _ = count()  # rows of a sweep that is resumed took no time of this one
        self.started_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, and take the bar away."""
        self._ended.set()
        self._thread.join()
        self.console.file.write("\r\x1b[K")
        self.console.file.flush()

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self.draw(time.monotonic() - self.started_s)

    def draw(self, elapsed_s: float) -> None:
        """Draw the bar as it is after ``elapsed_s``."""
        n_done, n_failed = self.count()
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self.n_runs, completed=n_done, width=_BAR_WIDTH)
        line.add_row(bar, progress_text(self.n_runs, n_done, n_failed, self.n_before, elapsed_s))
        with self.console.capture() as drawn:
            self.console.print(line)
        self.console.file.write("\r\x1b[K" + drawn.get().rstrip("\n ") + "\r")
        self.console.file.flush()


def progress_text(n_runs: int, n_done: int, n_failed: int, n_before: int, elapsed_s: float) -> str:
    """Runs done, failed and time left, at the pace of the runs that this sweep made itself."""
    parts = [f"{n_done}/{n_runs}"]
    if n_failed:
        parts.append(f"{n_failed} failed")
    if n_done > n_before:
        left_s = round((n_runs - n_done) * elapsed_s / (n_done - n_before))
        hours, rest = divmod(left_s, 3600)
        clock = (
            f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
        )
        parts.append(f"{clock} left")
    return ", ".join(parts)
