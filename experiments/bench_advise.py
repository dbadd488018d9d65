"""``python -m experiments.bench_advise [KEY=VALUE ...]``: bounded search against simulating all.

The candidates of an advice twice: as the advice looks for the best, by upper bounds and the most
promising first, and by simulating every one. Both must find the same best value. What readers get
wrong: the bounds are in the first time, finding out which candidates fit is in none of the second;
policies that take seconds to place a job (``mixed``) are left out, simulating all of theirs takes
hours.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from sim.advise_entry import settings_of
from sim.candidates import Space
from sim.run import RunSpec
from sim.search import Machine, Objective, best_first, places_slowly
from sim.settings import build

CONF = Path(__file__).resolve().parents[1] / "conf"
ADVICE = ("+experiment=advise", "model=opt-30b", "hardware=rtx3090", "advise.n_batches=[4]")


@dataclass(frozen=True, slots=True)
class Found:
    """One way to find the best candidate."""

    name: str
    n_simulated: int
    cpu_s: float
    value: float


def asked(overrides: Sequence[str]) -> tuple[RunSpec, Space, Objective]:
    """The run, its candidates and what is best, as the command line describes them."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = _container([*ADVICE, *overrides])
        settings, names = settings_of(config["advise"])
        policies = {
            name: build(_container([*ADVICE, *overrides, f"policy={name}"]), ()).policy
            for name in names
        }
    quick = {name: policy for name, policy in policies.items() if not places_slowly(policy)}
    return build(config, overrides), settings.space(quick), settings.objective


def _container(overrides: Sequence[str]) -> dict[str, Any]:
    composed: Any = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
    return dict(composed)


def measure(base: RunSpec, space: Space, objective: Objective) -> tuple[Found, Found]:
    """Both ways, each on a machine of its own; ``ValueError`` where no candidate counts."""
    start_s = time.process_time()
    machine = Machine(base, base.hardware, objective)
    bounded = machine.enumerate(space)
    best = best_first(machine, bounded)
    searched_s = time.process_time() - start_s
    if best is None or best.value is None:
        raise ValueError(f"advise: none of {len(bounded)} candidates counts")
    searched = Found("bounds, best first", machine.n_simulated, searched_s, best.value)
    start_s = time.process_time()
    other = Machine(base, base.hardware, objective)
    values = [other.tried(candidate).value or 0.0 for candidate, _ in bounded]
    spent_s = time.process_time() - start_s
    return searched, Found("every candidate", other.n_simulated, spent_s, max(values))


def table(rows: Sequence[Found]) -> Table:
    """Both side by side."""
    out = Table(box=SIMPLE)
    for name in ("search", "simulations", "CPU s", "best value", "speed-up"):
        out.add_column(name, justify="left" if name == "search" else "right")
    for row in rows:
        out.add_row(row.name, str(row.n_simulated), f"{row.cpu_s:.1f}", f"{row.value:.4g}",
                    f"{rows[-1].cpu_s / row.cpu_s:.1f}")  # fmt: skip
    return out


def main(overrides: Sequence[str]) -> None:
    """Search both ways and print a table."""
    base, space, objective = asked(overrides)
    searched, every = measure(base, space, objective)
    if searched.value != every.value:
        raise RuntimeError(f"the search found {searched.value}, the best is {every.value}")
    console = Console()
    console.print(f"{base.model.name}, {base.hardware.name}, {objective.name}")
    console.print(table((searched, every)))


if __name__ == "__main__":
    main(sys.argv[1:])
