"""Length traces: how many tokens each request brings, finds cached and generates.

A trace counts ``prompt_tokens`` (new in this request), ``cached_prefix_tokens`` (context before
them, K) and ``response_tokens``. What readers get wrong: an *offline* job has no cache, so its
prompt is the whole context, ``cached_prefix_tokens + prompt_tokens + 1`` (the 1 is the BOS token).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from policies.spec.workload import Lengths
from sim.columns import NULL, read_columns

TASKS = ("translation", "classification", "extraction", "summarisation")
"""Values 0..3 of a trace's ``task`` column."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthTrace:
    """Requests of one source as columns of shape (n_requests,), in file order, in tokens.

    ``n_unknown_prefix`` counts rows that say nothing of reuse (a null, or no such column in the
    file): their ``cached_prefix_tokens`` is 0. ``n_other_tasks`` counts rows that a task filter
    left out.
    """

    source: str
    prompt_tokens: NDArray[np.int64]
    cached_prefix_tokens: NDArray[np.int64]
    response_tokens: NDArray[np.int64]
    n_unknown_prefix: int = 0
    n_other_tasks: int = 0

    def __post_init__(self) -> None:
        n = len(self.prompt_tokens)
        for name in ("prompt_tokens", "cached_prefix_tokens", "response_tokens"):
            values = getattr(self, name)
            if len(values) != n:
                raise ValueError(f"{name}: has {len(values)} rows, prompt_tokens has {n}")
            if n and values.min() < 0:
                raise ValueError(f"{name}: {values.min()} must be >= 0")

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def n_zero_responses(self) -> int:
        """Requests without a response; ``offline`` lets them generate 1 token."""
        return int(np.count_nonzero(self.response_tokens == 0))

    @property
    def offline_prompt_tokens(self) -> NDArray[np.int64]:
        """Prompt of each request where nothing is cached: K + prompt_tokens + 1 (BOS)."""
        return self.cached_prefix_tokens + self.prompt_tokens + 1

    @property
    def kappa_ratio(self) -> NDArray[np.float64]:
        """K / T with T = prompt_tokens + 1 (arXiv 2601.19910)."""
        return self.cached_prefix_tokens / (self.prompt_tokens + 1)

    def offline(self) -> list[Lengths]:
        """Requests of an offline job: whole context as prompt, a response of 0 as 1."""
        responses = np.maximum(self.response_tokens, 1)
        pairs = zip(self.offline_prompt_tokens.tolist(), responses.tolist(), strict=True)
        return [Lengths(prompt, response) for prompt, response in pairs]


def read_trace(path: str | Path, task: str | None = None) -> LengthTrace:
    """Read a whole CSV or Parquet trace; ``task`` keeps one of ``TASKS`` where a file has several.

    Raises ``ValueError`` naming file, line and column for everything that ``read_columns`` refuses,
    for a task that is not in ``TASKS`` or not in the file.
    """
    path = Path(path)
    if task is not None and task not in TASKS:
        raise ValueError(f"task: {task!r} must be one of {', '.join(TASKS)}")
    wanted = ("prompt_tokens", "response_tokens", *(("task",) if task else ()))
    columns = read_columns(path, wanted, optional=("cached_prefix_tokens",))
    n = len(columns["prompt_tokens"])
    prefix = columns.get("cached_prefix_tokens", np.full(n, NULL))
    keep = np.ones(n, dtype=bool)
    if task is not None:
        keep = columns["task"] == TASKS.index(task)
        if not keep.any():
            present = ", ".join(str(value) for value in np.unique(columns["task"]))
            raise ValueError(f"{path}, column task: no row of {task}, it has tasks {present}")
    return LengthTrace(
        source=str(path) if task is None else f"{path} ({task})",
        prompt_tokens=columns["prompt_tokens"][keep],
        cached_prefix_tokens=np.where(prefix == NULL, 0, prefix)[keep],
        response_tokens=columns["response_tokens"][keep],
        n_unknown_prefix=int(np.count_nonzero(prefix[keep] == NULL)),
        n_other_tasks=n - int(np.count_nonzero(keep)),
    )


def stratified(lengths: Sequence[Lengths], limit: int | None, seed: int) -> list[Lengths]:
    """``limit`` requests spread evenly over the list sorted by length (prompt, then response).

    The sorted list is cut into ``limit`` runs, equal to within one request, and one request of each
    is drawn. The same requests in any order, limit and seed give the same sample, sorted by length.
    A limit of None, or of at least all requests, keeps all.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: {limit} must be >= 1, or null for all requests")
    ordered = sorted(lengths, key=lambda r: (r.prompt_tokens, r.response_tokens))
    if limit is None or limit >= len(ordered):
        return ordered
    edges = np.arange(limit + 1) * len(ordered) // limit
    picks = np.random.default_rng(seed).integers(edges[:-1], edges[1:])
    return [ordered[i] for i in picks]
