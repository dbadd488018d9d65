"""Quantile tables: the statistics of a length trace, and seeded draws that reproduce them.

A table holds quantiles of prompt and response, and for document traces of document length and
questions per document. Each pair is tied by a Gaussian copula with the pair's Spearman rank
correlation; question lengths do not depend on their document. What readers get wrong: kappa's
median is one over *questions*, so a correlation of document length with the number of questions
moves it, though both margins stay.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.lengths import LengthTrace

PROBABILITIES: tuple[float, ...] = (
    *(0.0, 0.001, 0.005),
    *(i / 100 for i in range(1, 100)),
    *(0.995, 0.999, 1.0),
)


_REQUEST_NAMES = ("prompt_tokens", "response_tokens")
_DOCUMENT_NAMES = ("document_tokens", "questions")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two integer variables: their quantiles at ``PROBABILITIES`` and their rank correlation."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    rank_correlation: float

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            values = getattr(self, name)
            if len(values) != len(PROBABILITIES):
                raise ValueError(
                    f"{name}: has {len(values)} quantiles, it must have {len(PROBABILITIES)}"
                )
            if values[0] < 0 or any(b < a for a, b in pairwise(values)):
                raise ValueError(f"{name}: quantiles must be >= 0 and must not decrease")
        if not -1.0 <= self.rank_correlation <= 1.0:
            raise ValueError(f"rank_correlation: {self.rank_correlation} must be in [-1, 1]")

    @classmethod
    def of(cls, first: NDArray[np.int64], second: NDArray[np.int64]) -> Pair:
        """Statistics of two columns of shape (n,); ties share their mean rank."""
        ranks = [pd.Series(values).rank() for values in (first, second)]
        varies = all(r.nunique() > 1 for r in ranks)
        correlation = float(ranks[0].corr(ranks[1])) if varies else 0.0
        return cls(_quantiles(first), _quantiles(second), round(correlation, 4))

    def draw(self, n: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``n`` pairs: two arrays of shape (n,).

        Normal scores with Pearson correlation ``2 sin(pi rho_s / 6)`` have Spearman correlation
        rho_s; each goes through the inverse of its variable's distribution function, which is
        linear between two quantiles and rounded to integers.
        """
        rho = 2.0 * math.sin(math.pi * self.rank_correlation / 6.0)
        x, e = rng.standard_normal(n), rng.standard_normal(n)
        y = rho * x + math.sqrt(max(0.0, 1.0 - rho * rho)) * e
        return _inverse(self.first, x), _inverse(self.second, y)


@dataclass(frozen=True, slots=True)
class LengthTable:
    """Statistics of a trace of ``n_requests``.

    ``requests`` is (prompt_tokens, response_tokens). ``documents`` is (document tokens, questions
    per document) where each document is the cached prefix of its questions; None: no prefix.
    """

    source: str
    n_requests: int
    requests: Pair
    documents: Pair | None = None

    def __post_init__(self) -> None:
        if self.n_requests < 1:
            raise ValueError(f"n_requests: {self.n_requests} must be >= 1")
        if self.documents is not None and self.documents.second[0] < 1:
            raise ValueError("documents: every document must have at least one question")

    @classmethod
    def of(cls, trace: LengthTrace, document_ids: NDArray[np.int64] | None) -> LengthTable:
        """Statistics of a trace; ``document_ids`` of shape (n_requests,) groups its questions."""
        if document_ids is None and trace.cached_prefix_tokens.any():
            raise ValueError(
                f"{trace.source}: has cached prefixes, its table needs a column document_id"
            )
        documents = None
        if document_ids is not None:
            _, first, counts = np.unique(document_ids, return_index=True, return_counts=True)
            documents = Pair.of(trace.cached_prefix_tokens[first], counts.astype(np.int64))
        requests = Pair.of(trace.prompt_tokens, trace.response_tokens)
        return cls(trace.source, len(trace), requests, documents)

    def to_json(self) -> str:
        """The table as JSON text."""
        raw = {
            "source": self.source,
            "n_requests": self.n_requests,
            "probabilities": PROBABILITIES,
            "requests": _named(self.requests, _REQUEST_NAMES),
        }
        if self.documents is not None:
            raw["documents"] = _named(self.documents, _DOCUMENT_NAMES)
        return json.dumps(raw) + "\n"

    @classmethod
    def from_json(cls, text: str) -> LengthTable:
        """Inverse of ``to_json``."""
        raw = json.loads(text)
        if tuple(raw["probabilities"]) != PROBABILITIES:
            raise ValueError("probabilities: differ from those that this version reads")
        requests = _pair(raw["requests"], _REQUEST_NAMES)
        documents = _pair(raw["documents"], _DOCUMENT_NAMES) if "documents" in raw else None
        return cls(raw["source"], raw["n_requests"], requests, documents)

    def draw(self, source: str, n: int, rng: np.random.Generator) -> LengthTrace:
        """``n`` requests; whole documents one after another, the last one cut at n questions."""
        prefix = np.zeros(n, dtype=np.int64)
        if self.documents is not None:
            tokens, questions = self.documents.draw(n, rng)  # n documents are always enough
            prefix = np.repeat(tokens, questions)[:n]
        prompt, response = self.requests.draw(n, rng)
        return LengthTrace(source, prompt, prefix, response)


def _named(pair: Pair, names: tuple[str, str]) -> dict[str, object]:
    return {
        names[0]: pair.first,
        names[1]: pair.second,
        "rank_correlation": pair.rank_correlation,
    }


def _pair(raw: Mapping[str, Any], names: tuple[str, str]) -> Pair:
    return Pair(tuple(raw[names[0]]), tuple(raw[names[1]]), raw["rank_correlation"])


def _quantiles(values: NDArray[np.int64]) -> tuple[int, ...]:
    found = np.quantile(values, PROBABILITIES, method="inverted_cdf")
    return tuple(int(v) for v in found)


def _inverse(quantiles: Sequence[int], scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """Values at the normal scores: the standard normal CDF, then the interpolated quantiles."""
    probability = [0.5 * (1.0 + math.erf(z / math.sqrt(2.0))) for z in scores.tolist()]
    return np.rint(np.interp(probability, PROBABILITIES, quantiles)).astype(np.int64)
