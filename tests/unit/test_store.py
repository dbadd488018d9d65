"""The KV store and the write-back queue."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.store import DiskSpeed, PrefixStore
from sim.writeback import WriteBack


def chain(key, n):
    return ((key, n),) if n else ()


def test_a_chain_is_found_up_to_what_is_held():
    store = PrefixStore(10, 0)
    store.put(chain("a", 4), 0.0)
    assert store.match(chain("a", 9)) == (4, 0)
    assert store.match(chain("a", 2)) == (2, 0)
    assert store.match(chain("b", 2)) == (0, 0)


def test_the_least_recently_used_chain_loses_its_tail():
    store = PrefixStore(10, 0)
    store.put(chain("a", 4), 0.0)
    store.put(chain("b", 4), 0.0)
    store.use(chain("a", 4), 0.0)
    store.put(chain("c", 4), 0.0)
    assert [store.match(chain(k, 4)).n_blocks for k in "abc"] == [4, 2, 4]
    assert store.counts.n_dropped == 2


def test_what_the_host_evicts_goes_to_disk_and_comes_back():
    store = PrefixStore(6, 100)
    store.put(chain("a", 5), 0.0)
    store.put(chain("b", 4), 0.0)
    assert store.match(chain("a", 5)) == (2, 3)
    assert store.use(chain("a", 5), 0.0) == (2, 3)  # found so; now it is in the host
    assert store.match(chain("a", 5)) == (5, 0)
    assert store.match(chain("b", 4)) == (1, 3)
    assert (store.counts.n_demoted, store.counts.n_promoted) == (6, 3)


def test_hashes_share_their_front():
    store = PrefixStore(100, 0)
    store.put(((1, 1), (2, 1), (3, 1)), 0.0)
    assert store.match(((1, 1), (2, 1), (9, 1), (3, 1))).n_blocks == 2


def test_a_prefix_loses_its_end_first():
    store = PrefixStore(2, 0)
    store.put(((1, 1), (2, 1), (3, 1)), 0.0)
    assert store.match(((1, 1), (2, 1), (3, 1))).n_blocks == 2


def test_a_disk_keeps_only_what_it_can_write():
    speed = DiskSpeed(write_blocks_per_s=1.0, read_blocks_per_s=10.0, buffer_s=2.0)
    store = PrefixStore(4, 100, speed)
    store.put(chain("a", 4), 0.0)
    store.put(chain("b", 4), 0.0)  # four blocks leave, two can be buffered
    assert store.match(chain("a", 4)) == (0, 2)  # the first two
    assert (store.counts.n_demoted, store.counts.n_dropped) == (2, 2)
    store.put(chain("c", 2), 100.0)
    assert store.match(chain("b", 4)) == (2, 2)
    store.put(chain("e", 2), 100.5)  # half a block may be written by now
    assert store.match(chain("b", 4)) == (0, 0)  # its front is gone, so is what was behind it
    with pytest.raises(ValueError, match="before"):
        store.put(chain("d", 1), 1.0)


def test_capacities_and_speeds_must_make_sense():
    with pytest.raises(ValueError, match="host_blocks: -1"):
        PrefixStore(-1, 0)
    with pytest.raises(ValueError, match="write_blocks_per_s: 0"):
        DiskSpeed(0.0, 1.0)


@settings(max_examples=100, deadline=None)
@given(
    host=st.integers(0, 12),
    disk=st.integers(0, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 9)), max_size=40),
    slow=st.booleans(),
)
def test_books_balance(host, disk, steps, slow):
    """Never over capacity, counts equal sums, a match is a prefix of what was put."""
    store = PrefixStore(host, disk, DiskSpeed(0.5, 2.0, 4.0) if slow else None)
    put: dict[int, int] = {}
    for now, (is_put, key, n) in enumerate(steps):
        if is_put:
            store.put(chain(key, n), float(now))
            put[key] = max(put.get(key, 0), n)
        else:
            found = store.use(chain(key, n), float(now))
            assert found.n_blocks <= min(n, put.get(key, 0))
        assert 0 <= store.n_host <= host
        assert 0 <= store.n_disk <= disk
        held = [store.match(chain(key, 99)) for key in put]
        assert sum(m.n_host for m in held) == store.n_host
        assert sum(m.n_disk for m in held) == store.n_disk


# ---- write-back --------------------------------------------------------------------------


def test_actions_wait_for_what_was_issued_before_them():
    queue, done = WriteBack(), []
    queue.after(lambda: done.append("at once"))
    queue.issue(2.0)
    queue.after(lambda: done.append("two"))
    queue.issue(3.0)
    queue.after(lambda: done.append("five"))
    assert (done, queue.next_s) == (["at once"], 2.0)
    queue.set_left(3.5)
    assert done == ["at once"]
    queue.set_left(3.0)
    assert (done, queue.next_s) == (["at once", "two"], 3.0)
    queue.written_next()
    assert (done, queue.next_s, queue.pending_s) == (["at once", "two", "five"], None, 0.0)


def test_rounding_never_holds_an_action_back():
    queue, done = WriteBack(), []
    for i in range(1000):
        queue.issue(0.1 * (i % 7) + 1e-7)
        queue.after(lambda: done.append(1))
        if i % 3 == 0:
            queue.written_next()
    while queue.next_s is not None:
        queue.written_next()
    assert len(done) == 1000
