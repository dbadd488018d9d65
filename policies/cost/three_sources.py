"""Three sources of a cached token's K and V, and their best mix in closed form.

For every cached token of a decode step one may load its KV, load its layer input and project K and
V from it, or recompute it from its id. A mix is a point in the plane of compute and link time; the
mixes worth having lie on the lower convex hull of the three sources, so a best mix never takes more
than two of them. What readers get wrong: whether layer inputs are worth anything does not depend
on the machine. Compute rate and link rate stretch the plane along its axes and move no point across
a chord, so that is decided by the model (and, with attention counted, the context) alone.

Conditions, those of ``policies.cost.balance`` but for the weights: batches alike; constant rates
per token (no HBM floor but that in ``base_s``, no latency); the work of a token does not depend on
which others are recomputed; link and GPU overlap fully over the layer's time, which the weights of
the next layer share; every token has the home that its source needs. Tokens are real numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SOURCES = ("kv", "input", "recompute")
PAIR = ("kv", "recompute")
_Point = tuple[float, float]  # compute and link seconds of a token


@dataclass(frozen=True, slots=True)
class TokenSeconds:
    """Seconds that one cached token of one sequence takes in one layer, by source.

    ``load_kv_s`` is its KV on the link, ``load_input_s`` its layer input on the link and
    ``project_s`` K and V from that input on the GPU, ``recompute_s`` a forward of the whole layer.
    """

    load_kv_s: float
    load_input_s: float
    project_s: float
    recompute_s: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            _check(name, getattr(self, name))

    @property
    def input_pays(self) -> bool:
        """Whether the layer input is a corner of the hull: ``p / r + a / k < 1``.

        With p, a, r, k the project, input, recompute and KV times: it lies below the chord from
        loading KV to recomputing, that is, below every mix of those two.
        """
        p, a, r, k = self.project_s, self.load_input_s, self.recompute_s, self.load_kv_s
        return p * k + a * r < r * k

    def points(self) -> dict[str, _Point]:
        """Compute and link seconds by source."""
        return {
            "kv": (0.0, self.load_kv_s),
            "input": (self.project_s, self.load_input_s),
            "recompute": (self.recompute_s, 0.0),
        }


@dataclass(frozen=True, slots=True)
class Mix:
    """Cached tokens of every sequence by source, and the seconds of one layer of the block.

    ``load_all_s`` is the layer with all KV loaded, ``two_sources_s`` with the best mix of loading
    KV and recomputing (TightLLM's).
    """

    n_kv: float
    n_input: float
    n_recompute: float
    compute_s: float
    link_s: float
    step_s: float
    load_all_s: float
    two_sources_s: float

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares of KV loaded, inputs loaded and recomputed; all zero without cached tokens."""
        n = self.n_kv + self.n_input + self.n_recompute
        if n == 0:
            return 0.0, 0.0, 0.0
        return self.n_kv / n, self.n_input / n, self.n_recompute / n

    @property
    def region(self) -> str:
        """The sources in use, as ``kv+input``; ``none`` without cached tokens."""
        used = [name for name, share in zip(SOURCES, self.shares, strict=True) if share > 0]
        return "+".join(used) or "none"

    @property
    def limit(self) -> str:
        """The longer side, ``link`` or ``compute``; ``both`` if they are within 1e-9."""
        if math.isclose(self.compute_s, self.link_s, rel_tol=1e-9):
            return "both"
        return "link" if self.link_s > self.compute_s else "compute"

    @property
    def gain_over_load_all(self) -> float:
        """Time with all KV loaded over the time of this mix; 1 where nothing takes time."""
        return self.load_all_s / self.step_s if self.step_s else 1.0

    @property
    def gain_over_two_sources(self) -> float:
        """Time of the best mix without layer inputs over the time of this mix."""
        return self.two_sources_s / self.step_s if self.step_s else 1.0


def three_sources(
    token: TokenSeconds, n_ctx: int, n_seqs: int, weights_s: float = 0.0, base_s: float = 0.0
) -> Mix:
    """Mix of the least time of one layer of a block of ``n_seqs`` sequences over all batches.

    Minimises ``max(base + N (p n_a + r n_r), weights + N (k n_k + a n_a))`` over
    ``n_k + n_a + n_r = n_ctx``, with N sequences; ``weights_s`` is the layer's weights on the link
    once (0 if they are resident), ``base_s`` the compute of the new tokens. Along the hull compute
    grows and link time falls, so the optimum is where they are equal, on edge (x1, y1) to (x2, y2):

        m = (weights - base + N n_ctx (y1 - x1)) / (N ((x2 - x1) + (y1 - y2)))

    tokens of its second source, clipped to ``[0, n_ctx]``. Among equals the fewest tokens are
    computed. O(1); ``ValueError`` for what is negative or not finite.
    """
    block = _Block(token, n_ctx, n_seqs, weights_s, base_s)
    pair = block.balanced(PAIR)
    return block.mix(block.balanced(SOURCES) if token.input_pays else pair, pair, max)


def without_overlap(
    token: TokenSeconds, n_ctx: int, n_seqs: int, weights_s: float = 0.0, base_s: float = 0.0
) -> Mix:
    """The same where link and GPU take turns: sums in place of the maximum.

    Then the time is linear in the tokens and the optimum an end point: all tokens from the source
    of least ``compute + link`` seconds (KV before inputs before recompute among equals).
    """
    block = _Block(token, n_ctx, n_seqs, weights_s, base_s)
    best, pair = block.cheapest(SOURCES), block.cheapest(PAIR)
    return block.mix(best, pair, lambda compute_s, link_s: compute_s + link_s)


@dataclass(frozen=True, slots=True)
class _Block:
    """One layer of a block: what its tokens and the rest of it take."""

    token: TokenSeconds
    n_ctx: int
    n_seqs: int
    weights_s: float
    base_s: float

    def __post_init__(self) -> None:
        if self.n_ctx < 0:
            raise ValueError(f"n_ctx: {self.n_ctx} must be >= 0")
        if self.n_seqs < 1:
            raise ValueError(f"n_seqs: {self.n_seqs} must be >= 1")
        _check("weights_s", self.weights_s)
        _check("base_s", self.base_s)

    def balanced(self, names: Sequence[str]) -> dict[str, float]:
        """Tokens by source where compute and link are equal, on the hull with corners ``names``."""
        points, here = self.token.points(), names[0]
        for there in names[1:]:
            (x1, y1), (x2, y2) = points[here], points[there]
            excess_s = self.excess_s(x1, y1)
            if excess_s <= 0 or y2 >= y1:
                break
            missing_s = -self.excess_s(x2, y2)
            if missing_s > 0:
                # Both from a balance: n_ctx less the one is only noise where rates lie far apart.
                per_token_s = self.n_seqs * ((x2 - x1) + (y1 - y2))
                return {here: missing_s / per_token_s, there: excess_s / per_token_s}
            here = there
        return {here: float(self.n_ctx)}

    def excess_s(self, x: float, y: float) -> float:
        """By how much the link takes longer if every token takes x on the GPU and y on the link."""
        return self.weights_s - self.base_s + self.n_seqs * self.n_ctx * (y - x)

    def cheapest(self, names: Sequence[str]) -> dict[str, float]:
        """All tokens from the source of least seconds, link and compute together."""
        points = self.token.points()
        return {min(names, key=lambda name: sum(points[name])): float(self.n_ctx)}

    def sides(self, tokens: dict[str, float]) -> tuple[float, float]:
        """Compute and link seconds of a mix."""
        points = self.token.points()
        compute_s = sum(n * points[name][0] for name, n in tokens.items())
        link_s = sum(n * points[name][1] for name, n in tokens.items())
        return self.base_s + self.n_seqs * compute_s, self.weights_s + self.n_seqs * link_s

    def mix(
        self,
        best: dict[str, float],
        pair: dict[str, float],
        length: Callable[[float, float], float],
    ) -> Mix:
        """The result, with ``length`` of a step's compute and link seconds."""
        compute_s, link_s = self.sides(best)
        return Mix(
            n_kv=best.get("kv", 0.0),
            n_input=best.get("input", 0.0),
            n_recompute=best.get("recompute", 0.0),
            compute_s=compute_s,
            link_s=link_s,
            step_s=length(compute_s, link_s),
            load_all_s=length(*self.sides({"kv": float(self.n_ctx)})),
            two_sources_s=length(*self.sides(pair)),
        )


def _check(name: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{name}: {seconds} must be a finite number >= 0")
