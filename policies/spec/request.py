"""A serving request as policies may see it.

``n_cached`` tokens (K) have their KV in a store below the GPU, ``n_prefill`` tokens (T) are new.
What readers get wrong: a policy knows ``max_new``, the cap that the client sent, and never how
many tokens the model will really generate; that number stays with the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """``extend(n_cached, n_prefill)``, then decode of at most ``max_new`` tokens in all.

    The last ``n_disk`` of the cached tokens are on disk, the others in host memory. ``group`` is
    the tenant or class that fair sharing weighs.
    """

    index: int
    arrival_s: float
    n_cached: int
    n_prefill: int
    max_new: int
    n_disk: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        if not self.arrival_s >= 0:
            raise ValueError(f"arrival_s: {self.arrival_s} must be >= 0")
        if self.n_cached < 0:
            raise ValueError(f"n_cached: {self.n_cached} must be >= 0")
        if self.n_prefill < 1:
            raise ValueError(f"n_prefill: {self.n_prefill} must be >= 1")
        if self.max_new < 1:
            raise ValueError(f"max_new: {self.max_new} must be >= 1")
        if not 0 <= self.n_disk <= self.n_cached:
            raise ValueError(f"n_disk: {self.n_disk} must be in 0..{self.n_cached}")
        if self.group < 0:
            raise ValueError(f"group: {self.group} must be >= 0")

    @property
    def n_tokens(self) -> int:
        """K + T: tokens whose KV must be in GPU memory when the first token comes out."""
        return self.n_cached + self.n_prefill

    @property
    def kappa_ratio(self) -> float:
        """K / T (arXiv 2601.19910)."""
        return self.n_cached / self.n_prefill
