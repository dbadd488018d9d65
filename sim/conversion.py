"""What a converter of a public data set returns: columns, and what it left out and why.

What readers get wrong: *malformed* and *unusable* are different. A record that breaks the format (a
missing key, a wrong type, a negative count) stops the conversion with an error that says where; a
well-formed record without a usable request (an empty conversation) is skipped and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sim.columns import write_columns

CountTokens = Callable[[str], int]
"""Tokens of a text, without special tokens; ``UnicodeEncodeError`` for text that is not Unicode."""


@dataclass(slots=True)
class Conversion:
    """Rows of a trace under construction.

    ``lists`` holds the columns whose cells are lists. ``skipped`` counts by reason what is not in
    the columns; ``notes`` counts what is, with a reservation.
    """

    columns: dict[str, list[int]]
    lists: dict[str, list[list[int]]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def add(self, **row: int) -> None:
        """Append one row; it must name every column."""
        if row.keys() != self.columns.keys():
            raise ValueError(f"row: has {', '.join(row)}, must have {', '.join(self.columns)}")
        for name, value in row.items():
            self.columns[name].append(value)

    def write(self, path: Path, raw: Path) -> None:
        """Write the trace atomically; ``ValueError`` naming ``raw`` if every record was skipped."""
        if not len(self):
            reasons = ", ".join(f"{n} {why}" for why, n in self.skipped.items()) or "it is empty"
            raise ValueError(f"{raw}: no usable request ({reasons}), nothing was written")
        write_columns(path, self.columns, self.lists)


def field_of(record: object, key: str, kind: type, where: str) -> object:
    """``record[key]``; ``ValueError`` if the record is no object, lacks it or its type is wrong."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: is a {type(record).__name__}, must be an object")
    if key not in record:
        raise ValueError(f"{where}: key {key!r} is missing, it has {', '.join(record) or 'none'}")
    value = record[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(
            f"{where}, key {key!r}: is a {type(value).__name__}, must be a {kind.__name__}"
        )
    return value
