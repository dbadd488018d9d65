"""Best-first search with bounds finds what trying everything finds."""

from dataclasses import replace
from functools import cache

import pytest

from policies.errors import Infeasible
from policies.flexgen import FlexGen
from policies.spec.hardware import HardwareProfile
from sim.advise import AdviseSettings, advise
from sim.candidates import Candidate, Space
from sim.elasticity import Now, _settled
from sim.job import WorkloadSpec
from sim.pack import Job
from sim.resources import scaled
from sim.result import RunRecord
from sim.run import RunSpec
from sim.search import OBJECTIVES, Machine, Objective, best_first
from tests.policies_table import OPT, POLICIES, SMALL

NAMES = ("accelerate-pinned", "flexgen", "flexgen-pinned", "flexgen-cpu-attention", "tightllm-dp",
         "mixed", "kvpr", "cpu-attention")  # fmt: skip
SOME = {name: POLICIES[name] for name in NAMES}
FIXED = WorkloadSpec("fixed", "fixed", n_batches=1, batch_size=1, prompt_len=64, gen_len=5)
TRACE = WorkloadSpec("extraction", "extraction", n_batches=1, batch_size=1, limit=12, max_new=4)
TIGHT = replace(SMALL, gpu_bytes=0.9e9, host_bytes=4 * 2**31 + 0.5e9)
SPACE = Space(SOME, n_batches=(1, 3), max_batch_size=16, slices_per_batch=(None, 1))


def machine(
    objective: Objective, workload: WorkloadSpec = FIXED, hardware: HardwareProfile = TIGHT
) -> Machine:
    base = RunSpec(OPT, hardware, POLICIES["tightllm-dp"], workload, trace="none", engine="simpy")
    return Machine(base, hardware, objective)


@cache
def everything(name: str) -> list[tuple[Candidate, RunRecord, Job]]:
    """Every candidate of ``SPACE``, simulated."""
    whole = machine(Objective(), {"fixed": FIXED, "extraction": TRACE}[name])
    candidates = [item.candidate for item in whole.enumerate(SPACE)]
    return [(c, whole.tried(c).record, whole.job(c)) for c in candidates]


def values(name: str, objective: Objective) -> list[float]:
    return [
        objective.score(job, record)
        for _, record, job in everything(name)
        if objective.allows(record)
    ]


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("workload", [FIXED, TRACE], ids=lambda w: w.name)
def test_nothing_enumerated_is_better_and_most_is_not_simulated(name, workload):
    pruned = machine(Objective(name), workload)
    bounded = pruned.enumerate(SPACE)
    best = best_first(pruned, bounded)
    held = values(workload.name, Objective(name))
    assert best.value == max(held)
    assert all(v <= item.upper for v, item in zip(held, bounded, strict=True))
    assert pruned.n_simulated < len(bounded)


def test_a_latency_bound_is_kept():
    limit_s = sorted(record.tpot_s for _, record, _ in everything("fixed"))[20]
    bound = Objective(max_tpot_s=limit_s)
    found = machine(bound)
    best = best_first(found, found.enumerate(SPACE))
    assert best.record.tpot_s <= limit_s
    assert best.value == max(values("fixed", bound)) < max(values("fixed", Objective()))
    none = machine(Objective(max_tpot_s=1e-9))
    assert best_first(none, none.enumerate(SPACE)) is None
    assert none.n_simulated == 0  # bounds alone rule them out


def test_candidates_are_what_their_overrides_say():
    found = [item.candidate for item in machine(Objective()).enumerate(SPACE)]
    assert len({candidate.overrides for candidate in found}) == len(found)
    for candidate in found:
        held = dict(text.split("=", 1) for text in candidate.overrides)
        assert held.pop("policy") == candidate.name
        assert int(held.pop("workload.batch_size")) == candidate.batch_size
        assert int(held.pop("workload.n_batches")) == candidate.n_batches
        for key, text in held.items():
            value = getattr(candidate.policy, key.removeprefix("policy."))
            shown = f"[{','.join(f'{v:g}' for v in value)}]" if isinstance(value, tuple) else value
            assert str(shown) == text
    names = {candidate.name for candidate in found}
    assert names == set(NAMES)
    placed = [c for c in found if isinstance(c.policy, FlexGen) and c.policy.percent]
    assert {c.n_batches for c in placed} >= {1, 3}
    assert max(c.batch_size for c in found) == SPACE.max_batch_size  # FlexGen's own search too


def test_sizes_end_where_they_do_not_fit_or_cover_the_job():
    plain = replace(SPACE, placements=("host",))
    small = machine(Objective(), hardware=replace(TIGHT, disk_bytes=1e9))
    found = small.enumerate(replace(plain, n_batches=(1,), max_batch_size=2**14))
    assert 16 < max(item.candidate.batch_size for item in found) < 2**14
    assert small.n_unfit == len(NAMES)  # a series a policy
    trace = machine(Objective(), TRACE, SMALL)
    found = [i.candidate for i in trace.enumerate(plain)]
    assert max(c.batch_size for c in found if c.n_batches == 1) == 16  # of 12 requests
    assert max(c.batch_size for c in found if c.n_batches == 3) == 4


def test_other_slices_are_variants_of_one_candidate():
    found = machine(Objective()).enumerate(SPACE)
    assert not any("n_slices" in text for item in found for text in item.candidate.overrides)
    for item in found:
        sliced = SPACE.sliced(item.candidate)
        assert len(sliced) == (item.candidate.name in ("tightllm-dp", "mixed"))
        for candidate in sliced:
            assert candidate.policy.n_slices == candidate.n_batches
            assert f"policy.n_slices={candidate.n_batches}" in candidate.overrides
            assert set(candidate.overrides) > set(item.candidate.overrides)
            back = replace(SPACE, slices_per_batch=(1, None)).sliced(candidate)
            assert back == [item.candidate]


def test_a_policy_like_another_has_its_placement_and_sizes():
    found = [item.candidate for item in machine(Objective()).enumerate(SPACE)]
    for other in found:
        made = SPACE.like("mixed", other)
        assert (made is None) == bool(getattr(other.policy, "percent", None))
        if made is not None:
            assert made in [c for c in found if c.name == "mixed"] or other.name != "tightllm-dp"
            assert (made.batch_size, made.n_batches) == (other.batch_size, other.n_batches)
            assert made.policy.placement == other.policy.placement
    (some, *_) = (c for c in found if c.policy.placement == "auto")
    assert SPACE.like("kvpr", some) is None


def test_mixed_is_no_worse_than_its_corners_although_it_has_few_tries():
    ranked = {
        r.tried.candidate.name: r for r in TestAdvice().advice(settings={"n_samples": 0}).ranking
    }
    best = max(ranked[name].value for name in ("tightllm-dp", "kvpr"))  # same placements
    assert ranked["mixed"].value >= 0.99 * best


def test_a_policy_is_placed_only_as_it_can_be():
    found = [item.candidate for item in machine(Objective()).enumerate(SPACE)]
    places = {name: {c.policy.placement for c in found if c.name == name} for name in NAMES}
    assert places.pop("kvpr") == {"host"}
    assert all(held == {"host", "auto"} for held in places.values())


@pytest.mark.parametrize("resource", ["gpu_memory", "host_memory"])
def test_what_a_capacity_settles_stays_as_it_is(resource):
    """The plan of a settled candidate is the same with more of it."""
    now = machine(Objective())
    bounded = now.enumerate(SPACE)
    settled = _settled(Now(now, bounded, SPACE, None, None), resource)
    more = Machine(now.base, scaled(TIGHT, resource, 1.5), now.objective)
    assert 0 < len(settled) < len(bounded)
    for item in bounded:
        if item.candidate in settled:
            assert more.placed(item.candidate) == now.placed(item.candidate)
            assert more.upper(item.candidate) == item.upper
    left = {item.candidate for item in more.enumerate(SPACE, settled)}
    assert not left & settled
    assert left >= {item.candidate for item in bounded} - settled


def test_sizes_between_the_powers_of_two_make_blocks_about_as_large():
    space = replace(SPACE, n_batches=(1, 2, 3), max_batch_size=256)
    assert space.near(64, 1) == [40, 48, 56, 80, 96, 112]
    assert space.near(64, 2) == [20, 24, 28, 40, 48, 56]
    assert space.near(64, 3) == [10, 13, 18, 21, 26, 37, 42]
    assert space.near(2, 2) == []
    assert max(replace(space, max_batch_size=90).near(64, 1)) == 80


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_batches": ()}, "advise.n_batches"),
        ({"n_batches": (0,)}, "advise.n_batches"),
        ({"max_batch_size": 0}, "advise.max_batch_size"),
        ({"placements": ("gpu",)}, "advise.placements: 'gpu' is none of host, auto, flexgen"),
        ({"slices_per_batch": (0,)}, "advise.slices_per_batch: 0"),
        ({"policies": {}}, "advise.policies"),
    ],
)
def test_a_space_says_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SPACE, **change)


class TestAdvice:
    settings = AdviseSettings(n_batches=(1, 3), max_batch_size=16, slices_per_batch=(None, 1),
                              n_samples=30)  # fmt: skip

    def advice(self, **changes):
        settings = replace(self.settings, **changes.pop("settings", {}))
        hardware = changes.pop("hardware", TIGHT)
        policies = changes.pop("policies", SOME)
        base = RunSpec(OPT, hardware, POLICIES["tightllm-dp"], FIXED, trace="none")
        return advise(replace(base, **changes), policies, settings)

    def test_ranks_the_best_of_each_policy(self):
        found = self.advice()
        by_policy: dict[str, float] = {}
        for candidate, record, job in everything("fixed"):
            value = Objective().score(job, record)
            by_policy[candidate.name] = max(by_policy.get(candidate.name, 0.0), value)
        ranked = {r.tried.candidate.name: r.value for r in found.ranking}
        assert ranked.keys() == by_policy.keys()
        assert all(ranked[name] >= by_policy[name] * (1 - 1e-12) for name in ranked)
        held = [r.value for r in found.ranking]
        assert held == sorted(held, reverse=True)
        assert found.n_simulated < found.n_candidates
        for ranked in found.ranking:
            assert ranked.low < ranked.median < ranked.high
            assert ranked.low < ranked.value
            # A plan that balances this very machine may be worse on nearly every other.
            assert ranked.value < ranked.high or ranked.tried.candidate.name == "mixed"
        assert sum(r.wins for r in found.ranking) >= 1.0 - 1e-9
        assert next(iter(found.spread.values())) > 0.3

    def test_elasticities_are_of_what_it_waits_on(self):
        """KV and weights cross the link all the time: twice the link, twice the speed."""
        found = self.advice(settings={"placements": ("host",), "tries": 3})
        by_name = {item.resource: item for item in found.elasticities}
        assert by_name["link"].elasticity == pytest.approx(1.0, abs=0.1)
        assert by_name["disk"].elasticity == 0.0
        assert all(item.elasticity >= -1e-9 for item in found.elasticities)
        assert all(item.value >= found.ranking[0].value * (1 - 1e-9) for item in found.elasticities)

    def test_no_samples_no_ranges(self):
        found = self.advice(settings={"n_samples": 0})
        assert found.spread == {}
        assert {(r.low, r.wins) for r in found.ranking} == {(None, None)}

    def test_says_why_there_is_no_answer(self):
        nothing = self.advice(hardware=replace(SMALL, gpu_bytes=1e6))
        assert nothing.ranking == ()
        assert "nearest is policy=" in nothing.reason
        assert "gpu memory: need" in nothing.reason
        assert "(largest: " in nothing.reason
        none = self.advice(hardware=replace(SMALL, gpu_bytes=1e6), policies={"flexgen": FlexGen()},
                           settings={"placements": ("flexgen",)})  # fmt: skip
        assert none.reason == "no candidate fits into memory"
        slow = self.advice(settings={"objective": Objective(max_tpot_s=1e-9)})
        assert slow.reason == "no candidate reaches advise.max_tpot_s 1e-09 s per token"
        one = self.advice(workload=replace(FIXED, gen_len=1))
        assert one.reason == "the workload has no work that counts in decode_tokens_per_s"
        with pytest.raises(Infeasible, match="exceed"):
            self.advice(workload=replace(TRACE, reject_long=True),
                        model=replace(OPT, max_positions=2))  # fmt: skip

    @pytest.mark.parametrize(
        ("change", "message"),
        [({"change": 0.0}, "advise.change: 0.0"), ({"tries": 0}, "advise.tries: 0"),
         ({"n_samples": -1}, "advise.n_samples: -1")],
    )  # fmt: skip
    def test_settings_say_what_is_wrong(self, change, message):
        with pytest.raises(ValueError, match=message):
            replace(self.settings, **change)
