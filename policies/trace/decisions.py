"""``decisions.csv``: what a run decided, a row a step and batch, simulated or real.

What readers get wrong: ``n_ctx`` is what the batch had cached before the step, which is 0 in
prefill however long its prompt is.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from policies.drive import Decision
from policies.spec.workload import Block


class StepDecision(NamedTuple):
    """One line of ``decisions.csv``."""

    block: int
    step: int
    batch: int
    n_ctx: int
    n_recompute: int
    slices: int
    n_front: int = 0
    n_inputs: int = 0
    on_cpu: int = 0


_DECIDED = StepDecision._fields[4:]  # named as in ``Decision``


def step_decisions(block: Block, step: int, decision: Decision) -> Iterator[StepDecision]:
    """The rows of one step, one for each batch."""
    for b, batch in enumerate(block.batches):
        n_ctx = batch.prompt_len + step - 1 if step else 0
        of_batch = (getattr(decision, name)[b] for name in _DECIDED)
        yield StepDecision(block.index, step, b, n_ctx, *of_batch)


def write_decisions(rows: Iterable[StepDecision], path: Path) -> None:
    """Write the rows to ``path``, under a header."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(StepDecision._fields)
        writer.writerows(rows)


def read_decisions(path: Path) -> tuple[StepDecision, ...]:
    """The rows of a file; ``ValueError`` naming it for a missing column or what is no integer.

    A file may lack the columns that have a default: runs before there were such decisions.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        present = reader.fieldnames or ()
        optional = StepDecision._field_defaults
        names = [n for n in StepDecision._fields if n in present or n not in optional]
        missing = [name for name in names if name not in present]
        if missing:
            raise ValueError(f"{path}: lacks the columns {', '.join(missing)}")
        try:
            return tuple(StepDecision(**{n: int(row[n]) for n in names}) for row in reader)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
