"""What more of one resource would gain: the workload planned anew on a machine that has it.

The best candidate is decided again, and candidates whose bound moves and now reaches further are
tried. What readers get wrong: a capacity is no rate. Ten per cent more memory may gain nothing, or
let one more power of two in and gain more than ten per cent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from sim.candidates import HOST, Candidate, Space
from sim.replay import Replay
from sim.resources import CAPACITIES, scaled
from sim.search import Bounded, Machine, Tried, best_first, places_slowly


@dataclass(frozen=True, slots=True)
class Elasticity:
    """Relative change of the best value per relative change of a resource.

    ``log(value / value now) / log(factor)``; ``moves`` if another candidate is best then.
    """

    resource: str
    value: float
    elasticity: float
    moves: bool


class Now(NamedTuple):
    """What is known of the machine as it is: its candidates, the best, and that one's plan.

    ``space`` is what is enumerated again where a capacity grows.
    """

    machine: Machine
    bounded: list[Bounded]
    space: Space
    best: Tried
    plan: Replay


def elasticity(now: Now, resource: str, factor: float, tries: int) -> Elasticity:
    """With ``factor`` > 1 times as much of ``resource``; ``tries`` other candidates are simulated.

    A belief that differs from the machine learns of the change as well.
    """
    base, best = now.machine.base, now.best
    hardware = scaled(now.machine.hardware, resource, factor)
    belief = None if base.belief is None else scaled(base.belief, resource, factor)
    jobs = now.machine.jobs if base.workload.source == "fixed" else {}
    changed = Machine(replace(base, belief=belief), hardware, now.machine.objective, jobs)
    if resource in CAPACITIES:
        settled = _settled(now, resource)
        promising: Iterable[Bounded] = changed.enumerate(now.space, settled)
        same_place = now.plan.placed_on(hardware) == now.plan.placement
        known = best if same_place else changed.tried(best.candidate)
    else:
        promising = _moved(now, changed, factor, tries)
        value = now.plan.objective_on(now.machine.objective, hardware, belief or hardware)
        known = best._replace(value=value)
    then = best_first(changed, promising, (known, best), tries)
    if then is None or then.value is None or best.value is None:
        raise AssertionError(f"{resource}: more of it leaves no candidate that counts")
    gain = math.log(then.value / best.value) / math.log(factor)
    return Elasticity(resource, then.value, gain, then.candidate != best.candidate)


def _settled(now: Now, resource: str) -> set[Candidate]:
    """Candidates to which more of a capacity changes nothing: they fit, and lie where they lay.

    None of them is better than the best, or it would be the best now. Where ``mixed`` lies is not
    known without a search.
    """
    return {item.candidate for item in now.bounded if _is_settled(now, item.candidate, resource)}


def _is_settled(now: Now, candidate: Candidate, resource: str) -> bool:
    policy: Any = candidate.policy
    if places_slowly(policy):
        return False
    if getattr(policy, "percent", None) is not None:
        return True
    if resource == "gpu_memory":
        return getattr(policy, "placement", None) == HOST
    placement, model = now.machine.placed(candidate), now.machine.base.model
    on_disk = any(shares.disk for shares in placement.kv)
    return not (on_disk or placement.total_weight_bytes(model, "disk"))


def _moved(now: Now, changed: Machine, factor: float, n: int) -> list[Bounded]:
    """The ``n`` candidates with the largest bounds on the changed machine, of those that moved.

    With ``factor`` times the rates no time shrinks by more than that, so a candidate's old bound
    times ``factor`` bounds its new one, and most need not be bounded again. With a bound on latency
    a candidate may only count now, so all are.
    """
    found: list[Bounded] = []
    all_of_them = now.machine.objective.max_tpot_s is not None
    for candidate, upper in sorted(now.bounded, key=lambda item: -item.upper):
        found.sort(key=lambda item: -item.upper)
        if not all_of_them and len(found) >= n and upper * factor < found[n - 1].upper:
            break
        again = None if candidate == now.best.candidate else changed.upper(candidate)
        if again is not None and again > upper:
            found.append(Bounded(candidate, again))
    return list(islice(sorted(found, key=lambda item: -item.upper), n))
