"""Curves and grids: exact at their points, monotone between them, honest outside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.spec.curve import Curve, Grid

AMOUNT = st.floats(1e-3, 1e6)
RATE = st.floats(1e-3, 1e15)


@st.composite
def axes(draw: st.DrawFn, low: int = 1, high: int = 6) -> tuple[float, ...]:
    """Increasing positive values with gaps that a float can divide by."""
    steps = draw(st.lists(st.floats(0.01, 1e3), min_size=low, max_size=high))
    values = [steps[0]]
    for step in steps[1:]:
        values.append(values[-1] + step)
    return tuple(values)


@st.composite
def curves(draw: st.DrawFn, monotone: bool = False) -> Curve:
    x = draw(axes())
    y = draw(st.lists(RATE, min_size=len(x), max_size=len(x)))
    return Curve(x, tuple(sorted(y) if monotone else y))


@st.composite
def grids(draw: st.DrawFn, monotone: bool = False) -> Grid:
    x, y = draw(axes(high=4)), draw(axes(high=4))
    rows = [draw(st.lists(RATE, min_size=len(y), max_size=len(y))) for _ in x]
    if monotone:
        # Sorted rows, then sorted columns: increasing along both axes.
        columns = [sorted(column) for column in zip(*map(sorted, rows), strict=True)]
        rows = [list(row) for row in zip(*columns, strict=True)]
    return Grid(x, y, tuple(tuple(row) for row in rows))


# ---- Curve ------------------------------------------------------------------------------------


@given(curves())
def test_curve_is_exact_at_its_points(curve: Curve) -> None:
    assert [curve(x) for x in curve.x] == pytest.approx(list(curve.y), rel=1e-12)


@given(curves(monotone=True), AMOUNT, AMOUNT)
def test_monotone_points_give_a_monotone_curve(curve: Curve, a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    assert curve(low) <= curve(high) * (1 + 1e-12)


@given(curves(), AMOUNT)
def test_curve_stays_between_its_neighbours(curve: Curve, x: float) -> None:
    if curve.x[0] <= x <= curve.x[-1]:
        below = max(i for i, point in enumerate(curve.x) if point <= x)
        pair = curve.y[below : below + 2]
        assert min(pair) * (1 - 1e-12) <= curve(x) <= max(pair) * (1 + 1e-12)


@given(curves(), st.floats(1e-6, 1.0))
def test_below_the_first_point_the_rate_is_proportional(curve: Curve, share: float) -> None:
    assert curve(share * curve.x[0]) == pytest.approx(share * curve.y[0], rel=1e-12)
    assert not curve.extrapolated(share * curve.x[0])


@given(curves(), st.floats(1.001, 1e6))
def test_beyond_the_last_point_the_rate_holds_and_is_flagged(curve: Curve, factor: float) -> None:
    assert curve(factor * curve.x[-1]) == curve.y[-1]
    assert curve.extrapolated(factor * curve.x[-1])
    assert not curve.extrapolated(curve.x[-1])


def test_interpolation_is_linear_not_geometric() -> None:
    # Half way in x is half way in y; in log space it would be sqrt(100 * 400) = 200.
    assert Curve((1.0, 3.0), (100.0, 400.0))(2.0) == 250.0


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ((), (), "Curve.x: is empty"),
        ((1.0, 1.0), (1.0, 2.0), "Curve.x: .* strictly increasing"),
        ((2.0, 1.0), (1.0, 2.0), "Curve.x: .* strictly increasing"),
        ((0.0, 1.0), (1.0, 2.0), "Curve.x: .* must be positive"),
        ((1.0, 2.0), (1.0, 0.0), "Curve.y: .* must be positive"),
        ((1.0, 2.0), (1.0, -3.0), "Curve.y: .* must be positive"),
        ((1.0, 2.0), (1.0,), "2 x values and 1 y values"),
    ],
)
def test_curve_refuses_bad_points(x: tuple[float, ...], y: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve(x, y)


@pytest.mark.parametrize("x", [0.0, -1.0])
def test_curve_refuses_an_amount_that_is_not_positive(x: float) -> None:
    with pytest.raises(ValueError, match=r"x is .*, must be positive"):
        Curve((1.0,), (1.0,))(x)


# ---- Grid -------------------------------------------------------------------------------------


@given(grids())
def test_grid_is_exact_at_its_points(grid: Grid) -> None:
    for i, x in enumerate(grid.x):
        assert [grid(x, y) for y in grid.y] == pytest.approx(list(grid.z[i]), rel=1e-9)


@given(grids(monotone=True), AMOUNT, AMOUNT, AMOUNT, AMOUNT)
def test_monotone_points_give_a_monotone_grid(
    grid: Grid, x: float, y: float, dx: float, dy: float
) -> None:
    assert grid(x, y) <= grid(x + dx, y + dy) * (1 + 1e-9)


@given(grids(), AMOUNT, AMOUNT)
def test_grid_stays_within_its_extremes(grid: Grid, x: float, y: float) -> None:
    rates = [rate for row in grid.z for rate in row]
    below = min(1.0, x / grid.x[0])
    assert below * min(rates) * (1 - 1e-9) <= grid(x, y) <= below * max(rates) * (1 + 1e-9)


@given(grids(), st.floats(1e-6, 1.0), AMOUNT)
def test_grid_falls_in_proportion_below_its_first_x(grid: Grid, share: float, y: float) -> None:
    at_first = grid(grid.x[0], y)
    assert grid(share * grid.x[0], y) == pytest.approx(share * at_first, rel=1e-9)


@given(grids(), st.floats(1.001, 1e6))
def test_grid_holds_its_edges_and_flags_the_far_ones(grid: Grid, factor: float) -> None:
    x, y = grid.x[-1], grid.y[-1]
    assert grid(factor * x, factor * y) == grid.z[-1][-1]
    assert grid(x, grid.y[0] / factor) == grid.z[-1][0]
    assert grid.extrapolated(factor * x, y)
    assert grid.extrapolated(x, factor * y)
    assert not grid.extrapolated(x, y)


def test_grid_is_bilinear() -> None:
    grid = Grid((1.0, 3.0), (10.0, 20.0), ((100.0, 200.0), (300.0, 600.0)))
    assert grid(2.0, 15.0) == 300.0  # the mean of the four corners
    assert grid(1.0, 15.0) == 150.0
    assert grid(2.0, 10.0) == 200.0


@pytest.mark.parametrize(
    ("x", "y", "z", "message"),
    [
        ((), (1.0,), (), "Grid.x: is empty"),
        ((1.0,), (2.0, 1.0), ((1.0, 1.0),), "Grid.y: .* strictly increasing"),
        ((1.0, 2.0), (1.0,), ((1.0,),), "must have 2 rows of 1 values"),
        ((1.0,), (1.0, 2.0), ((1.0,),), "must have 1 rows of 2 values"),
        ((1.0,), (1.0,), ((0.0,),), "Grid.z: .* must be positive"),
    ],
)
def test_grid_refuses_bad_points(
    x: tuple[float, ...], y: tuple[float, ...], z: tuple[tuple[float, ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(x, y, z)


@pytest.mark.parametrize(("x", "y"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_grid_refuses_amounts_that_are_not_positive(x: float, y: float) -> None:
    with pytest.raises(ValueError, match="must both be positive"):
        Grid((1.0,), (1.0,), ((1.0,),))(x, y)
