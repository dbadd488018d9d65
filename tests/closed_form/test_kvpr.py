"""KVPR's split: the published example, enumeration, and its place among the three sources."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cost.kvpr import kvpr_split, kvpr_step_s
from policies.cost.three_sources import TokenSeconds, three_sources

TIMES = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(1e-3, 10.0))
NEVER = 1e9  # seconds to recompute a token where nobody would


def kvpr_1(schedule="row", weights_s=0.0):
    """One sequence and layer: h 4096, 2 bytes, 312 TFLOP/s, 32 GB/s, 1024 tokens."""
    h, flops_per_s, bytes_per_s = 4096, 312e12, 32e9
    token = (4 * h / bytes_per_s, 2 * h / bytes_per_s, 4 * h * h / flops_per_s)
    return kvpr_split(1024, *token, weights_s=weights_s, schedule=schedule)


def reduction(split):
    """Share of the time with all KV loaded that a split saves."""
    return 1.0 - split.step_s / split.load_all_s


def test_kvpr_1():
    """Worked example of papers.md section 4; exact but for the printed digits."""
    found = kvpr_1()
    assert found.n_project == 721
    assert 1e6 * found.load_all_s == pytest.approx(524.3, rel=0.002)
    assert 1e6 * found.step_s == pytest.approx(339.7, rel=0.002)
    assert reduction(found) == pytest.approx(0.352, rel=0.002)


def test_kvpr_1_with_streamed_weights():
    """By hand: 1024 tokens' inputs take 262.1 us and their projection 220.3, so all are projected.

    24 h^2 bytes of weights take 12.58 ms and hide nearly all that the split could save.
    """
    found = kvpr_1("column")
    assert (found.n_project, 1e6 * found.step_s) == (1024, pytest.approx(262.1, rel=0.002))
    found = kvpr_1("column", 24 * 4096**2 / 32e9)
    assert found.n_project == 1024
    assert reduction(found) == pytest.approx(262.1 / (12582.9 + 524.3), rel=0.002)


@settings(max_examples=150, deadline=None)
@given(
    n_ctx=st.integers(0, 40), kv=TIMES, act=TIMES, project=TIMES,
    weights=st.one_of(st.just(0.0), st.floats(0.0, 100.0)),
)  # fmt: skip
def test_no_other_split_is_faster(n_ctx, kv, act, project, weights):
    for schedule, fixed in (("row", 0.0), ("column", weights)):
        found = kvpr_split(n_ctx, kv, act, project, fixed, schedule)
        steps = [kvpr_step_s(n, n_ctx, kv, act, project, fixed, schedule) for n in range(n_ctx + 1)]
        assert found.step_s == pytest.approx(min(steps))
        assert found.step_s == steps[found.n_project]
        assert found.load_all_s == steps[0]
        if act >= kv:
            assert (found.n_project, found.step_s) == (0, found.load_all_s)


@settings(max_examples=150, deadline=None)
@given(
    n_ctx=st.integers(1, 3000),
    kv=st.floats(1e-3, 10.0),
    share=st.floats(0.05, 2.0),
    project=st.floats(1e-3, 10.0),
    recompute=st.floats(1e-3, 100.0),
    weights=st.one_of(st.just(0.0), st.floats(0.0, 100.0)),
)
def test_both_schedules_are_corners_of_three_sources(
    n_ctx, kv, share, project, recompute, weights
):  # fmt: skip
    """With streamed weights KVPR is the mix that never recomputes; its serial input load is worse.

    ``column`` equals the closed form, to one token, where recompute costs too much to be used.
    """
    act = share * kv
    row = kvpr_split(n_ctx, kv, act, project)
    column = kvpr_split(n_ctx, kv, act, project, weights, "column")
    token = TokenSeconds(kv, act, project, recompute)
    assert three_sources(token, n_ctx, 1).step_s <= row.step_s * (1 + 1e-12)
    assert three_sources(token, n_ctx, 1, weights).step_s <= column.step_s * (1 + 1e-12)
    dear = three_sources(TokenSeconds(kv, act, project, NEVER), n_ctx, 1, weights)
    assert dear.step_s == pytest.approx(column.step_s, abs=kv + act + project)
    assert dear.n_input == pytest.approx(column.n_project, abs=1.0 + 1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1.0, 1.0, 1.0, 0.0, "diagonal"), "schedule: 'diagonal' is none of"),
        ((-1, 1.0, 1.0, 1.0), "n_ctx: -1 must be >= 0"),
        ((1, math.inf, 1.0, 1.0), "load_kv_s: inf must be"),
        ((1, 1.0, 1.0, -1.0), "project_s: -1.0 must be"),
        ((1, 1.0, 1.0, 1.0, 2.0, "row"), "weights_s: 2.0 must be 0 in schedule row"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        kvpr_split(*arguments)
