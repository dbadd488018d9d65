"""Mean power over a replay that is mostly idle: windows without work are counted, not stored."""

from dataclasses import replace

import numpy as np
import pytest

from sim.power import PowerModel


def model() -> PowerModel:
    return PowerModel(80.0, 700.0, best_flops_per_s=1e15, context_watts=20.0)


def test_idle_windows_draw_the_base():
    one = np.array([0.0]), np.array([1.0]), np.array([0.0]), np.array([0.0])
    power = replace(model(), window_s=1.0)
    short, peak = power.over(*one, end_s=1.0)
    mean, peak_of_long = power.over(*one, end_s=4.0)
    assert short == peak == peak_of_long
    assert mean == pytest.approx((short + 3 * power.base_watts) / 4)


def test_a_replay_of_ten_billion_windows_takes_no_memory():
    one = np.array([5.0]), np.array([1.0]), np.array([0.5]), np.array([0.0])
    mean, peak = replace(model(), window_s=1.0).over(*one, end_s=1e10)
    assert mean == pytest.approx(model().base_watts, rel=1e-6)
    assert peak > mean
