"""Where a run's cached tokens came from, in words.

Shares are of tokens in decode steps. What readers get wrong: they say nothing about time; a token
that is projected from its layer input costs another share of link and GPU than one whose KV loads.
"""

from __future__ import annotations

from sim.result import RunRecord

_WORDS = {
    "n_load_mean": "KV loaded",
    "n_project_mean": "projected from layer inputs",
    "n_recompute_mean": "recomputed",
    "n_cpu_mean": "attended on the CPU",
    "n_resident_mean": "KV on the GPU",
}


def sources_text(record: RunRecord) -> str:
    """Shares of the sources in use; empty where nothing is decoded."""
    means = {words: getattr(record, column) or 0.0 for column, words in _WORDS.items()}
    total = sum(means.values())
    return ", ".join(f"{100 * n / total:.1f} % {words}" for words, n in means.items() if n)
