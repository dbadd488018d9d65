"""Values are of the types that fields declare, or the field is named."""

from dataclasses import dataclass
from typing import Literal

import pytest

from policies.typed import checked, typed


@dataclass
class Fields:
    n: int
    share: float = 0.5
    sizes: tuple[int, ...] = ()
    rates: tuple[float, ...] | None = None


def test_values_of_the_declared_types_are_taken_as_they_are():
    data = {"n": 3, "share": 1, "sizes": [1, 2], "rates": (1, 0.5)}
    assert checked("job", Fields, data) == data
    assert checked("job", Fields, {"n": 3, "rates": None}) == {"n": 3, "rates": None}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"n": True}, "job.n: True must be a whole number$"),
        ({"n": 1e3}, "job.n: 1000.0 must be a whole number .write it without an exponent"),
        ({"n": 1, "share": float("nan")}, "job.share: nan must be a finite number"),
        ({"n": 1, "sizes": [1, 1.5]}, r"job.sizes: \[1, 1.5\] must be a list of whole numbers$"),
        ({"n": 1, "sizes": 3}, "job.sizes: 3 must be a list of whole numbers$"),
        ({"n": 1, "rates": "12"}, "job.rates: '12' must be a list of numbers or null$"),
        ({"n": 1, "size": [1]}, "job.size: unknown key, did you mean sizes.*n, rates, share"),
        ({}, "job.n: is missing, Fields needs it"),
    ],
)
def test_what_is_wrong_is_named(data, message):
    with pytest.raises(ValueError, match=message):
        checked("job", Fields, data)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(Literal["a"], "a"), (dict[str, int], {}), (tuple[int, str], [1, "a"])],
)
def test_a_kind_that_cannot_be_checked_is_a_defect_that_names_the_field(kind, value):
    with pytest.raises(TypeError, match=r"^job.n: no value can be checked against "):
        typed("job.n", kind, value)
