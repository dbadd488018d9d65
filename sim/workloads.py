"""Length traces by name: the shipped sample, and generators from shipped quantile tables.

What readers get wrong: ``generate`` returns draws that have a data set's statistics, not its
requests. Its margins are those of the table; of the structure between requests only what
``sim.quantiles`` states is kept.
"""

from __future__ import annotations

from importlib.resources import as_file, files

import numpy as np

from sim.lengths import TASKS, LengthTrace, read_trace
from sim.quantiles import LengthTable

SHIPPED = ("sharegpt",)
GENERATED = ("narrativeqa", "finqa", *TASKS)


def shipped(name: str) -> LengthTrace:
    """Sample that the package ships: 3,032 turns of whole ShareGPT V3 conversations.

    Counts only, in Llama-3 tokens; stratified by total length of the conversation.
    """
    if name not in SHIPPED:
        raise ValueError(f"name: {name!r} must be one of {', '.join(SHIPPED)}")
    with as_file(files("sim") / "data" / f"{name}_turns_sample.csv") as path:
        trace = read_trace(path)
    return LengthTrace(
        f"{name} sample",
        trace.prompt_tokens,
        trace.cached_prefix_tokens,
        trace.response_tokens,
    )


def table(name: str) -> LengthTable:
    """Shipped statistics of a generated workload."""
    if name not in GENERATED:
        raise ValueError(f"name: {name!r} must be one of {', '.join(GENERATED)}")
    text = (files("sim") / "data" / f"{name}.json").read_text(encoding="utf-8")
    return LengthTable.from_json(text)


def generate(name: str, n: int | None = None, seed: int = 0) -> LengthTrace:
    """``n`` requests with the statistics of ``name`` (None: as many as the source has)."""
    if n is not None and n < 1:
        raise ValueError(f"n: {n} must be >= 1")
    statistics = table(name)
    count = statistics.n_requests if n is None else n
    return statistics.draw(f"{name} (generated, seed {seed})", count, np.random.default_rng(seed))
