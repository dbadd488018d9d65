"""``python -m experiments.bench_advise [KEY=VALUE ...]``: bounded search against simulating all.

The candidates of an advice twice: as the advice looks for the best, by upper bounds and the most
promising first, and by simulating every one. Both must find the same best value. What readers get
wrong: finding out which candidates fit is in the first time only, as the bounds are. Policies that
take seconds to place a job (``mixed``) are left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from experiments.bench_engine import composed
from sim.advise_entry import settings_of
from sim.candidates import Space
from sim.run import RunSpec
from sim.search import Machine, Objective, best_first, places_slowly
from sim.settings import build

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
    words = [*ADVICE, *overrides]
    config = composed(words)
    settings, names = settings_of(config["advise"])
    cells = {name: [*words, f"policy={name}"] for name in names}
    policies = {name: build(composed(cell), cell).policy for name, cell in cells.items()}
    quick = {name: policy for name, policy in policies.items() if not places_slowly(policy)}
    return build(config, words), settings.space(quick), settings.objective


def measure(base: RunSpec, space: Space, objective: Objective) -> tuple[Found, Found]:
    """Both ways, each on a machine of its own; ``ValueError`` where no candidate counts."""
    warm = Machine(base, base.hardware, objective)
    warm.tried(warm.enumerate(space)[0].candidate)  # loads what was compiled, solvers, tables
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
