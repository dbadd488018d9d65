"""Machines, models and turns for the serving tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from policies.admission import Admission, FairShare, Fifo, Rules, UtilisationAware, VramAware
from policies.prefix import Adaptive, Cake, LoadAll, PrefixPolicy, RecomputeAll
from policies.spec.hardware import HardwareProfile
from policies.spec.hardware_build import hardware_from_mapping
from policies.spec.model import ModelSpec
from policies.spec.request import Request
from sim.arrivals import Arrivals
from sim.fleet import ServeRun, ServeSpec, serve
from sim.serve_options import ServeOptions
from sim.sessions import Sessions, Turn

CONF = Path(__file__).parents[1] / "conf"

ADMISSIONS: dict[str, Admission] = {
    "fifo": Fifo(),
    "vram-aware": VramAware(),
    "vram-aware-bound-3": VramAware(Rules(max_overtaken=3)),
    "utilisation-aware": UtilisationAware(),
    "utilisation-aware-bound-0": UtilisationAware(Rules(max_overtaken=0)),
    "utilisation-aware-bound-3": UtilisationAware(Rules(max_overtaken=3), aging_per_s=0.0),
    "utilisation-aware-exact": UtilisationAware(Rules(max_overtaken=8), exact=True),
    "one-high-kappa": VramAware(Rules(high_kappa=5.0, max_high_kappa=1, max_overtaken=8)),
    "fair-share": FairShare(weights=(1.0, 2.0, 4.0)),
}
PREFIXES: dict[str, PrefixPolicy] = {
    "load-all": LoadAll(),
    "recompute-all": RecomputeAll(),
    "adaptive": Adaptive(),
    "adaptive-dp": Adaptive(solver="dp"),
    "cake": Cake(chunk_tokens=16),
}


@functools.cache
def model(name: str) -> ModelSpec:
    """A shipped model."""
    return ModelSpec(**yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text()))


@functools.cache
def machine(name: str) -> HardwareProfile:
    """A shipped machine."""
    return hardware_from_mapping(yaml.safe_load((CONF / "hardware" / f"{name}.yaml").read_text()))


def slow_link(bytes_per_s: float = 1e9, name: str = "h100") -> HardwareProfile:
    """A machine whose loads take long enough to be worth avoiding."""
    profile = machine(name)
    return replace(profile, h2d=replace(profile.h2d, bytes_per_s=bytes_per_s))


def requests(*sizes: tuple[int, int]) -> list[Request]:
    """Requests of (K, T), all at time 0."""
    return [Request(i, 0.0, k, t, 1) for i, (k, t) in enumerate(sizes)]


def singles(rows: Sequence[tuple[int, int, int]], groups: int = 1) -> Sessions:
    """Turns of (K, T, response) that stand alone."""
    turns = tuple(
        Turn(i, k, t, r, arrival_s=0.1 * i, group=i % groups) for i, (k, t, r) in enumerate(rows)
    )
    return Sessions("rows", turns, turns, True, None)


def conversations(rows: Sequence[Sequence[tuple[int, int]]]) -> Sessions:
    """Conversations of turns (T, response); each turn's history is all before it."""
    turns, heads = [], []
    for name, pairs in enumerate(rows):
        history, before = 0, None
        for prompt, response in pairs:
            turn = Turn(len(turns), history, prompt, response, key=("c", name))
            turns.append(turn)
            if before is None:
                heads.append(turn)
            else:
                before.next_turn = turn
            before = turn
            history += prompt + response
    return Sessions("conversations", tuple(turns), tuple(heads), False, None)


def backlog(
    sessions: Sessions,
    admission: Admission | None = None,
    prefix: PrefixPolicy | None = None,
    hardware: HardwareProfile | None = None,
    mode: str = "backlog",
    seed: int = 0,
    source: str = "trace",
    **options: object,
) -> ServeRun:
    """Serve with the tiny model; options as of ``ServeOptions``."""
    defaults: dict[str, object] = {"capacity_tokens": 4000, "budget_tokens": 256, "max_new": 64}
    defaults["kv_store"] = source
    spec = ServeSpec(
        model("tiny"),
        (hardware or machine("h100"),),
        ServeOptions(**(defaults | options)),
        Arrivals(mode=mode, rate=50.0, think_s=0.5, n_clients=3),
        admission or Fifo(),
        prefix or LoadAll(),
        seed=seed,
    )
    return serve(spec, sessions)


def tiled_sharegpt(sample: Sessions, times: int) -> Sessions:
    """The sample several times over, so that the end of the queue weighs less."""
    rng = np.random.default_rng(0)
    rows = [(t.n_history, t.n_prompt, t.n_response) for _ in range(times) for t in sample.turns]
    return singles([rows[i] for i in rng.permutation(len(rows))])
