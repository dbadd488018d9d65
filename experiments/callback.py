"""Hydra callback that turns the runs of a sweep into a table and figures.

Order matters: ``results.csv`` first, then the table, then an experiment's own tables and figures.
One of those that cannot be made costs one line of output, never a result. A sweep that asks for no
figures gets throughputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console

if TYPE_CHECKING:
    import pandas as pd

# Importing pandas and matplotlib takes as long as a small run, and most commands are single runs:
# the modules that need them are imported when a sweep has ended.


class Aggregate(Callback):
    """``figures`` are names ``module.function`` within this package, drawn to ``module_function``.

    Such a function takes the results, the sweep's folder and the path of the PNG. ``tables`` maps
    the name of a CSV file to a function that takes the results and the folder and returns a frame,
    which is printed too. ``columns`` are measures that the comparison table shows whatever its
    width.
    """

    def __init__(
        self,
        figures: Sequence[str] = ("throughput.both",),
        tables: Mapping[str, str] | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        self.figures = tuple(figures)
        self.tables = dict(tables or {})
        self.columns = tuple(columns)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Write ``results.csv``, print the table, draw the figures."""
        from experiments.load import load_sweep, write_results
        from experiments.table import comparison

        folder = Path(config.hydra.sweep.dir)
        results = load_sweep(folder)
        path = folder / "results.csv"
        write_results(results, path)
        console = Console()
        title = config.hydra.runtime.choices.get("experiment") or "sweep"
        heading = f"{title}: {len(results)} runs"
        console.print(comparison(results, heading, console.width, self.columns))
        console.print(f"results: {path}", soft_wrap=True, highlight=False)
        self.tabulate(results, folder, console)
        self.draw(results, folder, console)

    def tabulate(self, results: pd.DataFrame, folder: Path, console: Console) -> None:
        """Write and print every table; one that fails is reported in one line."""
        from experiments.load import write_results
        from experiments.table import listing

        for name, source in self.tables.items():
            path = folder / f"{name}.csv"
            try:
                frame = find("tables", source)(results, folder)
                write_results(frame, path)
            except Exception as error:  # whatever went wrong, the results stand
                _report(console, f"table {name} was not made", error)
            else:
                console.print(listing(frame, name, console.width))
                console.print(f"table:   {path}", soft_wrap=True, highlight=False)

    def draw(self, results: pd.DataFrame, folder: Path, console: Console) -> None:
        """Draw every figure; one that fails is reported in one line."""
        for name in self.figures:
            path = folder / f"{name.replace('.', '_')}.png"
            try:
                draw_figure(name, results, folder, path)
            except Exception as error:  # whatever went wrong, the results stand
                _report(console, f"figure {name} was not drawn", error)
            else:
                console.print(f"figure:  {path}", soft_wrap=True, highlight=False)


def draw_figure(name: str, results: pd.DataFrame, folder: Path, path: Path) -> None:
    """Draw figure ``module.function``; ``ValueError`` for a name that is none."""
    find("figures", name)(results, folder, path)


def find(setting: str, name: str) -> Callable[..., Any]:
    """Function ``module.function`` of this package; ``ValueError`` for a name that is none."""
    module, _, function = name.partition(".")
    try:
        found: Callable[..., Any] = getattr(import_module(f"experiments.{module}"), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{setting}: {name!r} is not a function of experiments ({error})"
        ) from error
    return found


def _report(console: Console, what: str, error: Exception) -> None:
    text = f"{what}: {type(error).__name__}: {error}"
    console.print(" ".join(text.split()), style="yellow", soft_wrap=True, markup=False)
