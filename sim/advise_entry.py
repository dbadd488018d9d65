"""The edge of an advice: settings in, files and tables out.

``advice.json`` has everything that was found; ``result.json`` is the row of the best run, so a
sweep over models or machines ends in one table. What readers get wrong: the line that runs the best
setting does not ask for advice again. It is checked against the configuration that was simulated,
key by key, and names what differs.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import OmegaConf

from policies.drive import Policy
from policies.errors import Infeasible
from policies.typed import typed, unknown_key
from sim import files
from sim.advise import Advice, AdviseSettings, Ranked, advise
from sim.columns import write_atomically
from sim.result import RunRecord
from sim.run import RunSpec
from sim.search import Objective
from sim.settings import build

ADVICE, CANDIDATES = "advice.json", "ranking.csv"
Compose = Callable[[Sequence[str]], dict[str, object]]
_CHOSEN = ("model", "hardware", "workload", "policy")
_NOT_IN_LINE = (*files.AROUND, "trace")  # no part of what is run


def settings_of(data: object) -> tuple[AdviseSettings, list[str]]:
    """Settings and the names of the policies; ``ValueError`` naming what is wrong."""
    if not isinstance(data, Mapping):
        raise ValueError(f"advise: {data!r} must be null or a mapping")
    given = {str(key): value for key, value in data.items()}
    kinds: dict[str, Any] = {
        "objective": str, "max_tpot_s": float | None, "policies": list, "n_batches": list,
        "max_batch_size": int, "placements": list, "slices_per_batch": list, "change": float,
        "tries": int, "n_samples": int, "sigma": dict,
    }  # fmt: skip
    for key, value in given.items():
        if key not in kinds:
            raise ValueError(unknown_key("advise", key, kinds))
        typed(f"advise.{key}", kinds[key], value)
    items = {"policies": str, "n_batches": int, "placements": str, "slices_per_batch": int | None}
    for key, kind in items.items():
        for value in given.get(key, ()):
            typed(f"advise.{key}", kind, value)
    for key, value in given.get("sigma", {}).items():
        typed(f"advise.sigma.{key}", float, value)
    names = given.pop("policies", [])
    objective = Objective(
        **{
            key: given.pop(name)
            for key, name in (("name", "objective"), ("max_tpot_s", "max_tpot_s"))
            if name in given
        }
    )
    lists: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return AdviseSettings(objective=objective, **lists), names


def advise_job(
    config: Mapping[str, object],
    overrides: Sequence[str],
    folder: Path,
    composer: Compose,
    choices: Mapping[str, str],
    provenance: Mapping[str, object],
    say: Callable[[str], None],
) -> tuple[RunRecord, Advice, list[str]]:
    """Find, write, and return the best row, the advice and the overrides of the best run.

    ``composer`` composes the job with more overrides; ``choices`` are its config groups' files.
    """
    settings, names = settings_of(config.get("advise"))
    base = build(config, overrides)
    policies = {name: _policy(composer, overrides, name) for name in names}
    try:
        advice = advise(base, policies, settings, say)
    except Infeasible as error:
        advice = Advice((), (), {}, 0, 0, 0, {}, error.reason)
    line: list[str] = []
    best_config = dict(config)
    if advice.ranking:
        best = advice.ranking[0].tried
        best_config = composer(best.candidate.overrides)
        line = _line(best_config, best.candidate.overrides, overrides, choices)
        record = best.record
    else:
        record = _unanswered(base, advice.reason)
    files.write_row(folder, record.as_row(), best_config, provenance)
    _write(folder, advice, settings, record, line)
    return record, advice, line


def _policy(composer: Compose, overrides: Sequence[str], name: str) -> Policy:
    cell = (f"policy={name}",)
    return build(composer(cell), [*overrides, *cell]).policy


def _unanswered(base: RunSpec, reason: str) -> RunRecord:
    return RunRecord(
        policy="",
        model=base.model.name,
        n_layers=base.model.n_layers,
        hardware=base.hardware.name,
        workload=base.workload.name,
        limit=base.workload.limit,
        max_new=base.workload.max_new,
        status="infeasible",
        reason=reason,
        seed=base.seed,
    )


# ---- the line that runs the best -----------------------------------------------------------------


def _line(
    wanted: Mapping[str, object],
    candidate: Sequence[str],
    overrides: Sequence[str],
    choices: Mapping[str, str],
) -> list[str]:
    """Overrides that compose to ``wanted``, without those that only ask for advice.

    What they do not compose to, because an experiment file set it, is added key by key.
    """
    set_by_candidate = {_key(text) for text in candidate}
    groups = [f"{g}={choices[g]}" for g in ("model", "hardware", "workload") if g in choices]
    own = [
        text
        for text in overrides
        if _key(text).partition(".")[0] not in (*_CHOSEN, *files.AROUND)
        or ("." in _key(text) and _key(text).partition(".")[0] in _CHOSEN)
    ]
    own = [t for t in own if _key(t) not in set_by_candidate and not _key(t).startswith("policy.")]
    line = [*groups, *own, *candidate]
    found = OmegaConf.to_container(compose("config", line), resolve=True)
    if not isinstance(found, dict):
        raise AssertionError("a composed configuration must be a mapping")
    known = dict(_leaves("", found))
    missing = [
        f"{'' if key in known else '+'}{key}={json.dumps(value)}"
        for key, value in _leaves("", wanted)
        if key.partition(".")[0] not in _NOT_IN_LINE and (key not in known or known[key] != value)
    ]
    return [*line, *missing]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _leaves(root: str, data: Mapping[Any, Any]) -> Iterator[tuple[str, object]]:
    for name, value in data.items():
        key = f"{root}.{name}" if root else str(name)
        if isinstance(value, Mapping) and value:
            yield from _leaves(key, value)
        else:
            yield key, value


def command(line: Sequence[str]) -> str:
    """The shell command of these overrides."""
    return shlex.join(["python", "-m", "sim", *line])


# ---- files ---------------------------------------------------------------------------------------


def _write(
    folder: Path, advice: Advice, settings: AdviseSettings, record: RunRecord, line: Sequence[str]
) -> None:
    content = {
        "model": record.model,
        "hardware": record.hardware,
        "workload": record.workload,
        "objective": settings.objective.name,
        "max_tpot_s": settings.objective.max_tpot_s,
        "reason": advice.reason,
        "run": command(line) if line else "",
        "ranking": [_ranked_row(i, ranked) for i, ranked in enumerate(advice.ranking, 1)],
        "change": settings.change,
        "elasticity": [asdict(e) for e in advice.elasticities],
        "spread": dict(advice.spread),
        "n_samples": settings.n_samples,
        "n_candidates": advice.n_candidates,
        "n_unfit": advice.n_unfit,
        "n_simulated": advice.n_simulated,
        "seconds": dict(advice.seconds),
    }
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_atomically(folder / ADVICE, lambda part: _write_text(part, text))
    rows = [_ranked_row(i, r) | r.tried.record.as_row() for i, r in enumerate(advice.ranking, 1)]
    if rows:
        write_atomically(folder / CANDIDATES, lambda part: _write_csv(part, rows))


def _ranked_row(rank: int, ranked: Ranked) -> dict[str, object]:
    candidate = ranked.tried.candidate
    return {
        "rank": rank,
        "policy": candidate.name,
        "overrides": " ".join(candidate.overrides),
        "value": ranked.value,
        "low": ranked.low,
        "median": ranked.median,
        "high": ranked.high,
        "wins": ranked.wins,
        "bottleneck": ranked.tried.record.bottleneck,
        "tpot_s": ranked.tried.record.tpot_s,
    }


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
