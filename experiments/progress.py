"""How far a sweep is: ``12/40`` behind a bar, on a terminal only.

The bar is drawn and the cursor goes back to the start of its line, so whatever a run prints next
overwrites it: runs and sweep need not know of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table

_BAR_WIDTH = 24


def count_runs(overrides: Sequence[str]) -> int:
    """Runs that Hydra's basic sweeper makes of these overrides: the product of their choices."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    sizes = [len(list(o.sweep_string_iterator())) for o in parsed if o.is_sweep_override()]
    return prod(sizes)


class SweepProgress:
    """Counts runs and draws the bar to ``console``."""

    def __init__(self, n_runs: int, console: Console) -> None:
        self.n_runs, self.console, self.n_done = n_runs, console, 0
        self._draw()

    def advance(self) -> None:
        """One more run has ended."""
        self.n_done += 1
        self._draw()

    def finish(self) -> None:
        """Take the bar away."""
        if self.console.is_terminal:
            self.console.file.write("\r\x1b[K")
            self.console.file.flush()

    def _draw(self) -> None:
        if not self.console.is_terminal:
            return
        line = Table.grid(padding=(0, 1))
        line.add_row(
            ProgressBar(total=self.n_runs, completed=self.n_done, width=_BAR_WIDTH),
            f"{self.n_done}/{self.n_runs}",
        )
        with self.console.capture() as drawn:
            self.console.print(line)
        self.console.file.write("\r\x1b[K" + drawn.get().rstrip("\n ") + "\r")
        self.console.file.flush()
