"""``python -m experiments.bench_workers [KEY=VALUE ...]``: a sweep on one worker and on two.

The same sweep twice as a user starts it, ``hydra/launcher=joblib`` (extra [joblib]) with one worker
and with two, into folders of their own. By default nine jobs of twenty cells, half of
``+experiment=ablation-grid``. What readers get wrong: these are wall-clock seconds, start-up and
tables included, and two workers cannot be twice as fast on a machine that does something else.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from experiments.load import load_sweep

SWEEP = ("+experiment=ablation-grid", "model=opt-13b,opt-30b,opt-66b")
WORKERS = (1, 2)
# Columns that depend on when and where a run took place, not on what it is.
_OF_THE_RUN = ("solve_s", "solver")


def run(overrides: Sequence[str], n_workers: int, folder: Path) -> tuple[float, pd.DataFrame]:
    """Seconds and rows of the sweep; ``RuntimeError`` with its errors if it did not end well."""
    start_s = time.perf_counter()
    done = subprocess.run(  # noqa: S603 - this interpreter
        (sys.executable, "-m", "sim", "-m", *overrides, "hydra/launcher=joblib",
         f"hydra.launcher.n_jobs={n_workers}", f"hydra.sweep.dir={folder}"),
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the sweep ended with {done.returncode}: {done.stderr or done.stdout}")
    return time.perf_counter() - start_s, load_sweep(folder)


def same(one: pd.DataFrame, other: pd.DataFrame) -> bool:
    """Whether two sweeps have the same rows, up to what depends on the process."""
    left, right = (
        rows.drop(columns=[c for c in _OF_THE_RUN if c in rows]) for rows in (one, other)
    )
    return left.equals(right)


def table(seconds: dict[int, float], n_runs: int) -> Table:
    """Seconds, runs per second and speed-up by number of workers."""
    out = Table(box=SIMPLE)
    for name in ("workers", "seconds", "runs/s", "speed-up"):
        out.add_column(name, justify="right")
    first = seconds[WORKERS[0]]
    for n, spent_s in seconds.items():
        row = (str(n), f"{spent_s:.1f}", f"{n_runs / spent_s:.1f}", f"{first / spent_s:.2f}")
        out.add_row(*row)
    return out


def main(overrides: Sequence[str]) -> None:
    """Run both and print a table."""
    chosen = tuple(overrides) or SWEEP
    console = Console()
    seconds: dict[int, float] = {}
    rows: dict[int, pd.DataFrame] = {}
    with tempfile.TemporaryDirectory() as folder:
        run(chosen, 1, Path(folder) / "warm")  # compiled code and bytecode are on disk after this
        for n in WORKERS:
            seconds[n], rows[n] = run(chosen, n, Path(folder) / str(n))
    if not same(*rows.values()):
        raise RuntimeError("one and two workers gave different rows")
    console.print(f"{' '.join(chosen)}: {len(rows[1])} runs, the same rows")
    console.print(table(seconds, len(rows[1])))


if __name__ == "__main__":
    main(sys.argv[1:])
