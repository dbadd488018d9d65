"""Hydra callback that turns the runs of a sweep into a table and figures.

Order matters: ``results.csv`` first, then the table, then figures. A figure that cannot be drawn
costs one line of output, never a result. A sweep that asks for no figures gets throughputs.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    Such a function takes the results, the sweep's folder and the path of the PNG.
    """

    def __init__(self, figures: Sequence[str] = ("throughput.both",)) -> None:
        self.figures = tuple(figures)

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
        console.print(comparison(results, f"{title}: {len(results)} runs", console.width))
        console.print(f"results: {path}", soft_wrap=True, highlight=False)
        self.draw(results, folder, console)

    def draw(self, results: pd.DataFrame, folder: Path, console: Console) -> None:
        """Draw every figure; one that fails is reported in one line."""
        for name in self.figures:
            path = folder / f"{name.replace('.', '_')}.png"
            try:
                draw_figure(name, results, folder, path)
            except Exception as error:  # whatever went wrong, the results stand
                text = f"figure {name} was not drawn: {type(error).__name__}: {error}"
                console.print(" ".join(text.split()), style="yellow", soft_wrap=True, markup=False)
            else:
                console.print(f"figure:  {path}", soft_wrap=True, highlight=False)


def draw_figure(name: str, results: pd.DataFrame, folder: Path, path: Path) -> None:
    """Draw figure ``module.function``; ``ValueError`` for a name that is none."""
    module, _, function = name.partition(".")
    try:
        draw = getattr(import_module(f"experiments.{module}"), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"figures: {name!r} is not a figure of experiments ({error})") from error
    draw(results, folder, path)
