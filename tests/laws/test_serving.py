"""Laws of serving: conservation, order, bounds, and what policies must not know."""

import inspect
import itertools
from dataclasses import fields, is_dataclass, replace
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission import AdmissionView, Fifo, Rules, UtilisationAware, VramAware, Waiting
from policies.errors import PlanError
from policies.prefix import IterationView, LoadAll, Split, Totals
from policies.routing import MachineView
from policies.spec.request import Request
from sim.arrivals import MODES
from sim.serving import ServingStalled
from tests.serving_table import (
    ADMISSIONS,
    PREFIXES,
    backlog,
    conversations,
    machine,
    singles,
    slow_link,
)

ROWS = st.lists(
    st.tuples(st.integers(0, 900), st.integers(1, 700), st.integers(1, 40)),
    min_size=1,
    max_size=25,
)
OPTIONS = st.fixed_dictionaries({
    "capacity_tokens": st.sampled_from([1800, 2500, 10_000]),
    "budget_tokens": st.sampled_from([16, 100, 2048]),
    "max_seqs": st.sampled_from([1, 4, 1024]),
    "overlap": st.booleans(),
    "write_back": st.booleans(),
    "prefill_only": st.booleans(),
    "window": st.sampled_from([1, 3, 512]),
    "watermark": st.sampled_from([0.0, 0.1]),
})  # fmt: skip


def check(run, rows, capacity, budget, prefill_only=False):
    """What holds of every run, whatever the policies."""
    requests_, log = run.requests, run.iterations
    served = requests_.column("request").astype(int)
    assert sorted([*served, *run.rejected]) == list(range(len(rows)))  # each ends exactly once
    times = [requests_.column(f"{n}_s") for n in ("arrival", "admitted", "first_token", "end")]
    for before, after in itertools.pairwise(times):
        assert (before <= after).all()
    out = requests_.column("n_out").astype(int)
    for i, n in zip(served, out, strict=True):
        assert n == (1 if prefill_only else min(rows[i][2], 64))  # tokens out
    new = requests_.column("n_prefill") + requests_.column("n_cached")
    assert [int(n) for n in new] == [sum(rows[i][:2]) for i in served]  # tokens in
    starts, seconds = log.column("start_s"), log.column("seconds")
    assert (np.diff(starts) >= seconds[:-1] * (1 - 1e-12) - 1e-12).all()  # clock, no overlap
    assert (log.column("n_held_tokens") <= capacity).all()
    computed = sum(log.column(n) for n in ("n_decode", "n_prefill_tokens", "n_recompute_tokens"))
    assert (computed <= budget).all()
    assert (computed > 0).all()
    if not requests_.column("n_preempted").any():
        assert log.column("n_prefill_tokens").sum() == sum(rows[i][1] for i in served)
        recomputed = requests_.column("n_head") + requests_.column("n_tail")
        assert log.column("n_recompute_tokens").sum() == recomputed.sum()
        cached = requests_.column("n_cached")
        assert log.column("n_load_tokens").sum() == (cached - recomputed).sum()


@settings(max_examples=200, deadline=None)
@given(
    rows=ROWS,
    admission=st.sampled_from(sorted(ADMISSIONS)),
    prefix=st.sampled_from(sorted(PREFIXES)),
    mode=st.sampled_from([m for m in MODES if m != "closed"]),
    options=OPTIONS,
)
def test_every_run_conserves(rows, admission, prefix, mode, options):
    run = backlog(
        singles(rows, groups=3),
        ADMISSIONS[admission],
        PREFIXES[prefix],
        slow_link(),
        mode,
        **options,
    )
    budget = max(options["budget_tokens"], 1)
    check(run, rows, options["capacity_tokens"], budget, options["prefill_only"])


@pytest.mark.parametrize("admission", sorted(ADMISSIONS))
def test_preempted_requests_end_too(admission):
    """Contexts that grow beyond memory are preempted and lose no token."""
    rows = [(200, 50, 60)] * 12
    run = backlog(
        singles(rows, groups=3), ADMISSIONS[admission], capacity_tokens=1100, watermark=0.0
    )
    assert run.requests.column("n_preempted").sum() > 0
    check(run, rows, 1100, 256)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(
        st.lists(st.tuples(st.integers(1, 300), st.integers(1, 30)), min_size=1, max_size=6),
        min_size=1,
        max_size=6,
    ),
    mode=st.sampled_from(["poisson", "closed"]),
    host=st.sampled_from([0, 20_000, 200_000, 1e9]),
    disk=st.sampled_from([0, 300_000, 1e9]),
    write_back=st.booleans(),
    capacity=st.sampled_from([2200, 8000]),
)
def test_conversations_with_a_store_conserve(sizes, mode, host, disk, write_back, capacity):
    """Turns come after one another, and a store only changes what is loaded and what computed."""
    sessions = conversations(sizes)
    rows = [(t.n_history, t.n_prompt, t.n_response) for t in sessions.turns]
    run = _stored(sessions, mode, host, disk, write_back, capacity)
    check_store(run, rows)
    ends = dict(zip(run.requests.column("request"), run.requests.column("end_s"), strict=True))
    arrivals = dict(
        zip(run.requests.column("request"), run.requests.column("arrival_s"), strict=True)
    )
    for turn in sessions.turns:
        if turn.next_turn is not None:
            assert arrivals[turn.next_turn.index] == pytest.approx(ends[turn.index] + 0.5)


def _stored(sessions, mode, host, disk, write_back, capacity=8000, hardware=None):
    return backlog(
        sessions, mode=mode, write_back=write_back, capacity_tokens=capacity, block_tokens=16,
        host_store_bytes=host, disk_store_bytes=disk, source="lru", hardware=hardware,
    )  # fmt: skip


def check_store(run, rows):
    served = run.requests.column("request").astype(int)
    new = run.requests.column("n_prefill") + run.requests.column("n_cached")
    assert [int(n) for n in new] == [sum(rows[i][:2]) for i in served]
    assert 0 <= run.n_hit <= run.n_history
    assert (run.requests.column("n_cached") % 16 == 0).all()


def test_same_seed_same_bytes():
    rows = [(37 * i % 800, 1 + 53 * i % 400, 1 + i % 30) for i in range(60)]

    def table(seed):
        run = backlog(singles(rows), UtilisationAware(), mode="poisson", seed=seed)
        return run.iterations.table().tobytes() + run.requests.table().tobytes()

    assert table(3) == table(3)
    assert table(3) != table(4)


def test_work_conserving():
    """The machine is never idle while somebody waits: a backlog runs without gaps."""
    rows = [(100 * (i % 9), 1 + 31 * i % 300, 1 + i % 9) for i in range(50)]
    for name, admission in ADMISSIONS.items():
        run = backlog(singles(rows, groups=3), admission, write_back=False)
        log = run.iterations
        ends = log.column("start_s") + log.column("seconds")
        gaps = log.column("start_s")[1:] - ends[:-1]
        assert gaps == pytest.approx(np.zeros(len(gaps)), abs=1e-12), name


# ---- starvation --------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3900), st.integers(1, 90), st.integers(1, 8)),
        min_size=5,
        max_size=80,
    ),
    bound=st.integers(0, 12),
    exact=st.booleans(),
    prefill_only=st.booleans(),
)
def test_nobody_is_overtaken_more_often_than_the_bound(rows, bound, exact, prefill_only):
    """The stated bound: at most ``max_overtaken`` later requests go first, and everyone ends."""
    rules = Rules(max_overtaken=bound)
    for admission in (UtilisationAware(rules, exact, 0.0), VramAware(rules)):
        run = backlog(singles(rows), admission, prefill_only=prefill_only, window=40)
        assert run.requests.column("max_overtaken").max(initial=0) <= bound
        assert run.requests.n_rows + run.n_rejected == len(rows)


def test_without_a_bound_somebody_starves():
    """The bound is not vacuous: greedy leaves a large prefix to the end of the queue."""
    rows = [(3800, 1, 1), *[(100, 60, 1)] * 200]
    free = UtilisationAware(Rules(max_overtaken=10**9), aging_per_s=0.0)
    run = backlog(singles(rows), free, prefill_only=True)
    assert run.requests.column("max_overtaken").max() > 100
    bounded = backlog(
        singles(rows), replace(free, rules=Rules(max_overtaken=16)), prefill_only=True
    )
    assert bounded.requests.column("max_overtaken").max() <= 16


def test_a_bound_of_zero_is_fifo():
    rows = [(700 * (i % 5), 1 + 17 * i % 90, 1 + i % 5) for i in range(40)]
    fifo = backlog(singles(rows), Fifo())
    zero = backlog(singles(rows), UtilisationAware(Rules(max_overtaken=0)))
    assert zero.requests.column("admitted_s").tolist() == (
        fifo.requests.column("admitted_s").tolist()
    )


# ---- L11: what policies see --------------------------------------------------------------


def _reachable(cls, seen):
    if cls in seen or not (is_dataclass(cls) or hasattr(cls, "_fields")):
        return
    seen.add(cls)
    for hint in get_type_hints(cls).values():
        for part in (hint, *get_args(hint)):
            if inspect.isclass(part):
                _reachable(part, seen)


def test_l11_no_type_that_a_policy_sees_holds_a_response_length():
    seen: set[type] = set()
    for cls in (Request, Waiting, AdmissionView, IterationView, Totals, Split, MachineView):
        _reachable(cls, seen)
    assert {Request, Waiting} <= seen
    names = {f.name for cls in seen if is_dataclass(cls) for f in fields(cls)}
    assert not {n for n in names if "response" in n or "out" in n.split("_")}


def test_l11_decisions_do_not_depend_on_responses_to_come():
    """Until the first difference in true lengths can show, both runs decide alike."""
    rows = [(37 * i % 800, 1 + 53 * i % 200, 10) for i in range(30)]
    longer = [(k, t, r + 7) for k, t, r in rows]
    for name, admission in ADMISSIONS.items():
        tables = [
            backlog(singles(r, groups=3), admission, max_seqs=8).iterations.table()
            for r in (rows, longer)
        ]
        # The first request of the shorter run ends after its prefill and nine decode steps.
        assert (tables[0][:9] == tables[1][:9]).all(), name


# ---- broken policies are named ----------------------------------------------------------------


class Greedy:
    name = "takes-all"

    def choose(self, queue, view):
        return tuple(range(len(queue)))


class Refuses:
    name = "refuses"

    def choose(self, queue, view):
        return ()


class TooMuch:
    name = "too-much"

    def split(self, request, view):
        return Split(n_tail=request.n_cached + 1)


def test_a_policy_that_overfills_memory_is_named():
    with pytest.raises(PlanError, match="takes-all"):
        backlog(singles([(3000, 10, 1)] * 3), Greedy())


def test_a_policy_that_recomputes_too_much_is_named():
    with pytest.raises(PlanError, match="too-much"):
        backlog(singles([(300, 10, 1)]), prefix=TooMuch())


def test_a_stalled_run_says_who_waits_for_what():
    with pytest.raises(
        ServingStalled, match=r"2 requests wait.*'refuses' admits none.*K 300, T 10"
    ):
        backlog(singles([(300, 10, 1)] * 2), Refuses())


def test_a_request_larger_than_memory_is_rejected_and_counted():
    run = backlog(singles([(300, 10, 1), (5000, 10, 1)]))
    assert (run.rejected, run.requests.n_rows) == ((1,), 1)


# ---- metamorphic --------------------------------------------------------------------------------


def _mean_ttft(run):
    return (run.requests.column("first_token_s") - run.requests.column("arrival_s")).mean()


MIX = [(150 * (i % 11), 1 + 31 * i % 120, 1 + i % 20) for i in range(60)]


@pytest.mark.parametrize("field", ["h2d", "hbm_bytes_per_s", "gemm"])
def test_a_faster_machine_has_earlier_first_tokens(field):
    slow = slow_link(2e9)
    value = getattr(slow, field)
    if field == "h2d":
        faster = replace(slow, h2d=replace(value, bytes_per_s=4e9))
    elif field == "gemm":
        faster = replace(slow, gemm=replace(value, y=tuple(2 * y for y in value.y)))
    else:
        faster = replace(slow, hbm_bytes_per_s=2 * value)
    slow, faster = (replace(h, launch_s=0.0) for h in (slow, faster))
    assert _mean_ttft(backlog(singles(MIX), hardware=faster)) < _mean_ttft(
        backlog(singles(MIX), hardware=slow)
    )


def test_a_slower_d2h_delays_memory():
    def ttft(rate, **options):
        base = machine("h100")
        hardware = replace(base, d2h=replace(base.d2h, bytes_per_s=rate))
        return _mean_ttft(backlog(singles(MIX), hardware=hardware, capacity_tokens=2000, **options))

    assert ttft(1e7) > ttft(1e9)
    assert ttft(1e7, write_back=False) == ttft(1e9, write_back=False)


def test_write_back_slows_loads_and_overlap_hides_them():
    slow = slow_link(2e8)
    free = backlog(singles(MIX), hardware=slow, write_back=False)
    paid = backlog(singles(MIX), hardware=slow, write_back=True)
    assert paid.iterations.column("load_s").sum() > free.iterations.column("load_s").sum()
    serial = backlog(singles(MIX), hardware=slow, write_back=False, overlap=False)
    assert free.end_s < serial.end_s


def test_a_larger_store_hits_more_and_is_faster():
    sizes = [[(200, 20)] * 8 for _ in range(8)]
    hits, ends = [], []
    for host in (0, 100_000, 10**9):
        run = _stored(conversations(sizes), "closed", host, 0, True)
        hits.append(run.n_hit)
        ends.append(run.iterations.column("n_prefill_tokens").sum())
    assert hits[0] == 0 < hits[1] < hits[2]
    assert ends[0] > ends[1] > ends[2]


def test_a_disk_below_the_host_keeps_what_the_host_evicts():
    sizes = [[(200, 20)] * 8 for _ in range(8)]
    without = _stored(conversations(sizes), "closed", 100_000, 0, True)
    with_disk = _stored(conversations(sizes), "closed", 100_000, 10**9, True)
    assert with_disk.n_hit > without.n_hit
    assert with_disk.iterations.column("n_disk_tokens").sum() > 0
    assert with_disk.counts["n_demoted"] > 0


def test_a_slower_disk_has_later_first_tokens():
    sizes = [[(200, 20)] * 8 for _ in range(8)]

    def ttft(rate):
        base = machine("h100")
        disk = replace(base.disk_read, bytes_per_s=rate)
        slow = replace(base, disk_read=disk, disk_write=replace(disk, bytes_per_s=1e12))
        return _mean_ttft(_stored(conversations(sizes), "closed", 100_000, 10**9, True, 8000, slow))

    assert ttft(1e6) > ttft(1e9)


def test_more_memory_never_schedules_less():
    means = []
    for capacity in (4000, 8000, 16_000):
        run = backlog(singles(MIX * 3), prefill_only=True, capacity_tokens=capacity)
        means.append(run.iterations.column("n_prefill_tokens").mean())
    assert means == sorted(means)
    assert means[0] < means[-1]


def test_load_all_on_a_fast_link_beats_recompute_all():
    fast = backlog(singles(MIX), prefix=LoadAll())
    again = backlog(singles(MIX), prefix=PREFIXES["recompute-all"])
    assert _mean_ttft(fast) < _mean_ttft(again)
