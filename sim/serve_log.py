"""What a serving run records: one line an iteration and one line a request.

Columns grow in typed arrays, 8 bytes a value, so that a replay of tens of thousands of requests
stays far below a gigabyte. What readers get wrong: an iteration's line is the decision as it was
taken, with what was known then; a request's line has the times that came of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

ITERATION_COLUMNS = (
    "server",
    "start_s",
    "seconds",
    "compute_s",
    "load_s",
    "disk_s",
    "store_pending_s",
    "n_waiting",
    "n_running",
    "n_decode",
    "n_admitted",
    "n_prefill_tokens",
    "n_recompute_tokens",
    "n_load_tokens",
    "n_disk_tokens",
    "n_store_tokens",
    "n_held_tokens",
    "n_preempted",
)
REQUEST_COLUMNS = (
    "request",
    "server",
    "arrival_s",
    "admitted_s",
    "first_token_s",
    "end_s",
    "n_history",
    "n_cached",
    "n_prefill",
    "n_head",
    "n_tail",
    "n_out",
    "n_preempted",
    "max_overtaken",
)


class Log:
    """Rows of numbers by column."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.columns = columns
        self._values = array("d")
        self.n_rows = 0

    def add(self, row: tuple[float, ...]) -> None:
        """Append a row with a value for every column."""
        if len(row) != len(self.columns):
            raise ValueError(f"row: has {len(row)} values, must have {len(self.columns)}")
        self._values.extend(row)
        self.n_rows += 1

    def table(self) -> NDArray[np.float64]:
        """All rows, shape (n_rows, n_columns)."""
        flat = np.frombuffer(self._values, dtype=np.float64) if self.n_rows else np.empty(0)
        return flat.reshape(self.n_rows, len(self.columns))

    def column(self, name: str) -> NDArray[np.float64]:
        """One column, shape (n_rows,)."""
        if name not in self.columns:
            raise ValueError(f"column: {name!r} is none of {', '.join(self.columns)}")
        return self.table()[:, self.columns.index(name)]

    def lines(self) -> Iterable[str]:
        """CSV lines, header first; whole numbers without a point."""
        yield ",".join(self.columns) + "\n"
        for row in self.table().tolist():
            yield ",".join(str(int(v)) if v == int(v) else repr(v) for v in row) + "\n"
