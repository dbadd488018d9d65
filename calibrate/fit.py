"""Fits: from points to links, rate curves and rates. Pure functions, no provenance, no files.

Every fit works on relative errors, so that 10 us at 64 KiB count as much as 5 ms at 1 GiB. What
readers get wrong is which average a curve is: GEMM shapes of a layer run one after another, so
their rate at some rows is total FLOPs over total time; attention shapes are alternatives, so
theirs is the median weighted by work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression, least_squares, nnls

from calibrate.grid import kv_bytes
from calibrate.predict import work
from calibrate.record import Point
from policies.cost.flops import causal_pairs
from policies.spec.curve import Curve, Grid
from policies.spec.hardware import Link

LINK_SCALE = 0.01  # relative errors that large are ordinary


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A link with standard errors."""

    link: Link
    latency_se_s: float
    bytes_per_s_se: float


def fit_link(points: Sequence[Point], most_latency_s: float = math.inf) -> LinkFit:
    """Robust least squares of ``(t0 + s / rate) / t - 1`` over the sizes given.

    Errors beyond ``LINK_SCALE`` count by their size, not its square (soft L1): a small copy can be
    twice as slow from one run to the next, and the rate of large ones must not make up for that.
    ``t0`` is kept from 0 to ``most_latency_s``, which is what the quickest copy of any size took; a
    single size has nothing to say about it and leaves it 0. ``ValueError`` without points.
    """
    if not points:
        raise ValueError("link: no points to fit")
    kept = sorted(points, key=lambda p: p.x["nbytes"])
    size = np.array([p.x["nbytes"] for p in kept])
    seconds = np.array([p.median_s for p in kept])
    if len(set(size.tolist())) == 1:
        rate = float(size.sum() / seconds.sum())
        return LinkFit(Link(0.0, rate), math.inf, math.inf)
    terms = np.stack([1.0 / seconds, size / seconds], axis=1)  # [n_sizes, (t0, 1 / rate)]
    scale = np.linalg.norm(terms, axis=0)
    start, _ = nnls(terms / scale, np.ones(len(kept)))
    most = np.array([most_latency_s, np.inf]) * scale

    def off(p: NDArray[np.float64]) -> NDArray[np.float64]:
        residuals: NDArray[np.float64] = terms / scale @ p - 1.0
        return residuals

    solution = least_squares(
        off,
        np.clip(start, 1e-9, 0.999 * most),
        bounds=(0.0, most),
        loss="soft_l1",
        f_scale=LINK_SCALE,
        xtol=1e-15,
        ftol=1e-15,
        gtol=1e-15,
    ).x
    latency, per_byte = (solution / scale).tolist()
    if per_byte <= 0:  # seconds that do not grow with size: noise, which the residual will show
        latency, per_byte = 0.0, float(seconds.sum() / size.sum())
    left = 1.0 - terms @ np.array([latency, per_byte])
    dof = max(1, len(kept) - 2)
    weight = 1.0 / np.sqrt(1.0 + (left / LINK_SCALE) ** 2)
    covariance = np.linalg.pinv((terms * weight[:, None]).T @ terms)
    covariance *= float(left @ (weight * left)) / dof
    se = np.sqrt(np.diag(covariance))
    return LinkFit(Link(latency, 1.0 / per_byte), float(se[0]), float(se[1]) / per_byte**2)


def fit_rate(points: Sequence[Point]) -> float:
    """Total work over total time."""
    if not points:
        raise ValueError("rate: no points to fit")
    return sum(work(p.group, p.x) for p in points) / sum(p.median_s for p in points)


def fit_scalar(points: Sequence[Point]) -> float:
    """Median seconds of a point that has no size."""
    if len(points) != 1:
        raise ValueError(f"{_group(points)}: {len(points)} points, needs exactly one")
    return points[0].median_s


def fit_duplex(points: Sequence[Point], h2d: Link, d2h: Link) -> float:
    """Mean over sizes and directions of the rate beside the other direction over that alone.

    Not limited to what a profile can hold (0.5 to 1).
    """
    links = {"duplex_h2d": h2d, "duplex_d2h": d2h}
    if not points:
        raise ValueError("duplex: no points to fit")
    return fmean(links[p.group].seconds(p.x["nbytes"]) / p.median_s for p in points)


def fit_gemm(points: Sequence[Point]) -> Curve:
    """FLOP/s by rows over all shapes; time never falls as rows grow."""
    rates = {rows: fit_rate(group) for rows, group in _by(points, "rows").items()}
    return curve_of(rates, lambda rows: rows)


def fit_decode(points: Sequence[Point]) -> Curve:
    """KV bytes/s by context; time never falls as the context grows."""
    return curve_of(_medians(points, "keys"), lambda keys: keys)


def fit_prefill(points: Sequence[Point]) -> Curve:
    """FLOP/s by context; the time of one sequence never falls as it grows."""
    return curve_of(_medians(points, "keys"), lambda n: causal_pairs(int(n), int(n)))


def fit_passes(points: Sequence[Point]) -> Curve:
    """Bytes/s by the bytes that kernels move; time never falls as those grow."""
    rates = {work(p.group, p.x): fit_rate([p]) for p in points}
    return curve_of(rates, lambda moved: moved)


def fit_window(points: Sequence[Point]) -> Grid:
    """FLOP/s by (queries, context); contexts that lack a query count are left out.

    The time of a context never falls as queries are added. More queries than keys there are none:
    such a cell, which only interpolation touches, holds the rate of its context's last one.
    """
    queries = tuple(sorted(_by(points, "queries")))
    columns: dict[float, Curve] = {}
    for keys, group in sorted(_by(points, "keys").items()):
        medians = _medians(group, "queries")
        if sorted(medians) == [q for q in queries if q <= keys]:
            columns[keys] = curve_of(medians, lambda q, keys=keys: causal_pairs(int(q), int(keys)))  # type: ignore[misc]
    if not columns:
        raise ValueError("attention_window: no context was measured with every query count")
    rows = tuple(tuple(curve(q) for curve in columns.values()) for q in queries)
    return Grid(queries, tuple(columns), rows)


def fit_unfused_scores(points: Sequence[Point], first: Curve) -> Curve:
    """Scores/s of further queries by context: prefills less the time of ``first`` for their KV.

    At least a tenth of a prefill is its scores, whatever noise says. The time of one sequence never
    falls as it grows.
    """
    rates = {}
    for keys, group in _by(points, "keys").items():
        scores = [work(p.group, p.x) * (1.0 - 1.0 / keys) for p in group]
        spent = [max(p.median_s - kv_bytes(p.x) / first(keys), 0.1 * p.median_s) for p in group]
        rates[keys] = weighted_median([n / s for n, s in zip(scores, spent, strict=True)], scores)
    return curve_of(rates, lambda n: n * n)


def curve_of(rates: Mapping[float, float], amount: Callable[[float], float]) -> Curve:
    """A curve through rates, its times ``amount(x) / rate`` made non-decreasing.

    Pool adjacent violators on the logarithm of time: a point faster than a smaller one is noise
    and shares its time with it. The rate itself may fall, as it does at a power limit.
    """
    x = sorted(rates)
    log_s = np.log([amount(v) / rates[v] for v in x])
    if any(later < earlier for earlier, later in pairwise(log_s.tolist())):
        log_s = isotonic_regression(log_s).x
    y = [amount(v) / float(np.exp(t)) for v, t in zip(x, log_s, strict=True)]
    return Curve(tuple(x), tuple(y))


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The value at which half the weight is reached; between two, their mean."""
    order = np.argsort(values)
    ranked = [float(values[i]) for i in order]
    reached = np.cumsum([weights[i] for i in order])
    half = float(reached[-1]) / 2
    i = int(np.searchsorted(reached, half))
    if np.isclose(reached[i], half) and i + 1 < len(ranked):
        return 0.5 * (ranked[i] + ranked[i + 1])
    return ranked[i]


def _medians(points: Iterable[Point], key: str) -> dict[float, float]:
    """Median rate at each amount, weighted by work."""
    medians = {}
    for value, group in _by(points, key).items():
        amounts = [work(p.group, p.x) for p in group]
        rates = [w / p.median_s for w, p in zip(amounts, group, strict=True)]
        medians[value] = weighted_median(rates, amounts)
    return medians


def _by(points: Iterable[Point], key: str) -> dict[float, list[Point]]:
    groups: dict[float, list[Point]] = {}
    for point in points:
        groups.setdefault(point.x[key], []).append(point)
    if not groups:
        raise ValueError(f"{key}: no points to fit")
    return groups


def _group(points: Sequence[Point]) -> str:
    return points[0].group if points else "points"
