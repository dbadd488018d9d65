"""Cells of a Hydra job: many runs inside one, each composed as the command line would compose it.

A Hydra job costs 0.2 s before any work, so a large grid is cut into few jobs (``hydra.sweeper``)
of many cells (``grid``). What readers get wrong: a cell is not a shorter kind of run. It is written
as overrides, in Hydra's language, and composed by Hydra; only what two cells share is kept.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import cast

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

Cell = tuple[str, ...]


def expand(grid: object, overrides: Collection[str] = ()) -> list[Cell]:
    """Overrides of every cell of ``grid``, the last key varying fastest; one cell without a grid.

    ``grid`` maps keys to what a sweep may hold: ``"512,1024"``, ``"range(1, 4)"``, a list or one
    value. Keys may be nested. As in Hydra's sweeps, a key that ``overrides`` set is not varied.
    ``ValueError`` for a grid that cannot be read.
    """
    if grid is None:
        return [()]
    if not isinstance(grid, Mapping):
        raise ValueError(f"grid: {grid!r} must be null or a mapping of keys to values")
    set_already = {_key(text) for text in overrides}
    axes = [
        [f"{key}={value}" for value in _choices(key, values)]
        for key, values in _flat("", grid)
        if _key(key) not in set_already
    ]
    return list(product(*axes))


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _flat(root: str, grid: Mapping[object, object]) -> Iterator[tuple[str, object]]:
    for name, value in grid.items():
        key = f"{root}.{name}" if root else str(name)
        if isinstance(value, Mapping):
            yield from _flat(key, value)
        else:
            yield key, value


def _choices(key: str, values: object) -> list[str]:
    """What ``key`` takes, as text that Hydra reads back."""
    if isinstance(values, Sequence) and not isinstance(values, str):
        found = [v if isinstance(v, str) else json.dumps(v) for v in values]
    elif isinstance(values, str):
        (parsed,) = OverridesParser.create().parse_overrides([f"{key}={values}"])
        swept = parsed.is_sweep_override()
        if swept and not parsed.is_discrete_sweep():
            raise ValueError(f"grid.{key}: {values!r} must be a list, a choice or a range")
        found = [str(v) for v in parsed.sweep_string_iterator()] if swept else [values]
    else:
        found = [json.dumps(values)]
    if not found:
        raise ValueError(f"grid.{key}: is empty, must hold at least one value")
    return found


class Composer:
    """Composes the cells of one Hydra job; must be used inside it.

    ``job`` is the job's composed configuration and ``overrides`` what the job set. Overrides that
    choose a config file, add or delete are Hydra's business, and the result is kept by them; those
    that set a value are applied to a copy, which is what Hydra does with them last.
    """

    def __init__(self, job: DictConfig, overrides: Sequence[str], name: str = "config") -> None:
        self.overrides, self.name = tuple(overrides), name
        self._bases: dict[Cell, DictConfig] = {(): job}

    def __call__(self, cell: Cell) -> dict[str, object]:
        """Resolved configuration of a cell."""
        parsed = OverridesParser.create().parse_overrides(list(cell))
        values = [override for override in parsed if self._sets_a_value(override)]
        chosen = tuple(str(override.input_line) for override in parsed if override not in values)
        if chosen not in self._bases:
            self._bases[chosen] = compose(self.name, [*self.overrides, *chosen])
        return _with_values(self._bases[chosen], values)

    def _sets_a_value(self, override: Override) -> bool:
        """Whether ``override`` changes a value and does not choose a file of a group."""
        if override.type is not OverrideType.CHANGE or override.package is not None:
            return False
        job, key = self._bases[()], override.key_or_group
        return "." in key or (key in job and not OmegaConf.is_config(OmegaConf.select(job, key)))


def _with_values(config: DictConfig, values: Sequence[Override]) -> dict[str, object]:
    """Resolved ``config`` with values set; ``config`` is as before when this returns."""
    changed = config
    if any(OmegaConf.is_config(_raw(config, o.key_or_group)) for o in values):
        changed = copy.deepcopy(config)  # merged into, which cannot be undone value by value
    before: list[tuple[str, object]] = []
    try:
        for override in values:
            key = override.key_or_group
            raw = _raw(changed, key)
            OmegaConf.update(changed, key, override.value(), merge=True)
            before.append((key, raw))
        return cast(dict[str, object], OmegaConf.to_container(changed, resolve=True))
    finally:
        for key, raw in reversed(before if changed is config else []):
            OmegaConf.update(changed, key, raw, merge=False)


def _raw(config: DictConfig, key: str) -> object:
    """What stands at ``key``, interpolations as they are written."""
    parent, _, name = key.rpartition(".")
    holder = OmegaConf.select(config, parent) if parent else config
    if not isinstance(holder, DictConfig) or name not in holder:
        return None
    found: object = OmegaConf.to_container(holder, resolve=False)[name]  # type: ignore[call-overload,index]
    return OmegaConf.create(found) if isinstance(found, dict | list) else found
