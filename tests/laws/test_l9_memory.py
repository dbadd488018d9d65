"""L9: memory never above capacity, every pool freed once; against a list of what is held."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import OutOfMemory
from sim.memory import Ledger

CAPACITY = {"gpu": 100.0, "host": 250.0}
_CALL = st.one_of(
    st.tuples(st.sampled_from("abcdef"), st.sampled_from(list(CAPACITY)), st.integers(0, 120)),
    st.tuples(st.sampled_from("abcdef"), st.none(), st.just(0)),  # free
)


@settings(deadline=None)
@given(st.lists(_CALL, max_size=40))
def test_ledger_equals_a_list_of_what_is_held(calls):
    ledger = Ledger(CAPACITY)
    held: dict[str, tuple[str, int]] = {}
    totals = [dict.fromkeys(CAPACITY, 0)]
    for pool, tier, nbytes in calls:
        before = (ledger.pools(), ledger.held_bytes, ledger.peak_bytes)
        used = 0 if tier is None else sum(n for t, n in held.values() if t == tier)
        if tier is None and pool in held:
            ledger.free(pool)
            del held[pool]
        elif tier is None or pool in held:
            with pytest.raises(ValueError, match=f"'{pool}' is"):
                ledger.free(pool) if tier is None else ledger.allocate(pool, tier, nbytes)
            assert (ledger.pools(), ledger.held_bytes, ledger.peak_bytes) == before
        elif used + nbytes > CAPACITY[tier]:
            with pytest.raises(OutOfMemory) as caught:
                ledger.allocate(pool, tier, nbytes)
            assert (caught.value.tier, caught.value.need_bytes) == (tier, used + nbytes)
            assert (ledger.pools(), ledger.held_bytes, ledger.peak_bytes) == before
        else:
            ledger.allocate(pool, tier, nbytes)
            held[pool] = (tier, nbytes)
        assert {p.name: (p.tier, p.nbytes) for p in ledger.pools()} == held
        totals.append({t: sum(n for u, n in held.values() if u == t) for t in CAPACITY})
        assert ledger.held_bytes == totals[-1]
        assert ledger.peak_bytes == {t: max(row[t] for row in totals) for t in CAPACITY}
        assert all(ledger.peak_bytes[t] <= CAPACITY[t] for t in CAPACITY)


def test_freed_twice_is_named():
    ledger = Ledger(CAPACITY)
    ledger.allocate("kv", "gpu", 10)
    ledger.free("kv")
    with pytest.raises(ValueError, match="pool: 'kv' is not held"):
        ledger.free("kv")
    assert ledger.held_bytes["gpu"] == 0


def test_overflow_is_named():
    ledger = Ledger(CAPACITY)
    ledger.allocate("weights", "gpu", 60)
    with pytest.raises(OutOfMemory) as caught:
        ledger.allocate("kv", "gpu", 41)
    error = caught.value
    assert (error.tier, error.need_bytes, error.have_bytes) == ("gpu", 101, 100)
    assert error.key == "weights"
