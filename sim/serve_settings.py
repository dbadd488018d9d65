"""From a composed configuration to a serving run, with every mistake named.

The group ``serve`` is flat for the user and splits here into arrivals, turns, options and targets.
What readers get wrong: keys of the offline workload (``limit``, ``max_new``, ``batch_size``) have
no meaning for a server. Setting one of them is refused instead of ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from policies.solver import SOLVERS
from policies.spec.hardware import HardwareProfile
from policies.spec.hardware_build import hardware_from_mapping
from policies.typed import checked, typed, unknown_key
from sim.arrivals import Arrivals
from sim.fleet import ServeSpec
from sim.mode_keys import SERVE
from sim.power import PowerModel, capped
from sim.serve_options import ServeOptions
from sim.serve_result import Targets
from sim.sessions import Sessions, load_sessions
from sim.settings import belief_of, check_keys, group_of, model_of

LOG_MODES = ("auto", "full", "none")
_ARRIVAL_KEYS = {"arrivals": "mode"} | {
    f.name: f.name for f in fields(Arrivals) if f.name != "mode"
}
_TARGET_KEYS = {f"slo_{f.name}": f.name for f in fields(Targets)}
_POWER_KEYS = {
    "context_watts": "context_watts",
    "busy_activity": "busy_activity",
    "flops_activity": "flops_activity",
    "copy_activity": "copy_activity",
    "power_window_s": "window_s",
}
_OPTION_KEYS = {f.name: f.name for f in fields(ServeOptions)}
_OWN_KEYS = ("limit", "history", "n_groups", "cap_watts", "log")


@dataclass(frozen=True, slots=True)
class ServeJob:
    """A serving run with its workload, its targets and one power model a machine."""

    spec: ServeSpec
    workload: str
    source: str
    path: str | None
    limit: int | None
    history: str
    n_groups: int
    targets: Targets
    power: tuple[PowerModel, ...]
    log: str

    def sessions(self) -> Sessions:
        """The turns to serve; ``ValueError`` for a trace that cannot be read."""
        return load_sessions(
            self.source,
            path=self.path,
            limit=self.limit,
            max_new=self.spec.options.max_new,
            history=self.history,
            n_groups=self.n_groups,
            seed=self.spec.seed,
        )


def build_serve(config: Mapping[str, object], overrides: Collection[str]) -> ServeJob:
    """The serving run that a resolved configuration describes.

    ``ValueError`` names the key, its value and what is allowed.
    """
    check_keys(SERVE, config, overrides)
    keys = group_of(config, "serve")
    known = (*_ARRIVAL_KEYS, *_TARGET_KEYS, *_POWER_KEYS, *_OPTION_KEYS, *_OWN_KEYS)
    for key in keys:
        if key not in known:
            raise ValueError(unknown_key("serve", key, known))
    for key in known:
        if key not in keys:
            raise ValueError(f"serve.{key}: is missing")
    name, source, path = _workload(group_of(config, "workload"))
    machines, power = _machines(config, keys)
    log = typed("serve.log", str, keys["log"])
    if log not in LOG_MODES:
        raise ValueError(f"serve.log: {log!r} is none of {', '.join(LOG_MODES)}")
    spec = ServeSpec(
        model=model_of(group_of(config, "model"), overrides),
        machines=machines,
        options=ServeOptions(**_part(ServeOptions, keys, _OPTION_KEYS)),
        arrivals=Arrivals(**_part(Arrivals, keys, _ARRIVAL_KEYS)),
        admission=component("admission", config, "choose"),
        prefix=component("prefix", config, "split"),
        routing=component("routing", config, "pick"),
        belief=belief_of(group_of(config, "hardware"), config.get("belief")),
        seed=typed("seed", int, config.get("seed", 0)),
    )
    return ServeJob(
        spec=spec,
        workload=name,
        source=source,
        path=path,
        limit=typed("serve.limit", int | None, keys["limit"]),
        history=typed("serve.history", str, keys["history"]),
        n_groups=typed("serve.n_groups", int, keys["n_groups"]),
        targets=Targets(**_part(Targets, keys, _TARGET_KEYS)),
        power=power,
        log=log,
    )


def component(group: str, config: Mapping[str, object], method: str) -> Any:
    """The policy object of a group, from its ``_target_``; it must have ``method``."""
    data = group_of(config, group)
    _check_target(group, data, method)
    try:
        return instantiate(data, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise


def _check_target(group: str, data: Mapping[str, Any], method: str | None) -> None:
    """Import ``_target_`` and check the values of its fields, nested targets too."""
    target = data.get("_target_")
    if not isinstance(target, str):
        raise ValueError(f"{group}._target_: {target!r} must name a class")
    module, _, name = target.rpartition(".")
    try:
        cls: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{group}._target_: {target!r} cannot be imported ({error})") from error
    suits = isinstance(cls, type) and is_dataclass(cls) and (not method or hasattr(cls, method))
    if not suits:
        raise ValueError(f"{group}._target_: {target!r} is no dataclass with {method}()")
    values = {key: value for key, value in data.items() if key != "_target_"}
    for key in [key for key, value in values.items() if isinstance(value, Mapping)]:
        _check_target(f"{group}.{key}", values.pop(key), None)
    checked(group, cls, values)
    if values.get("solver") is not None and values["solver"] not in SOLVERS:
        raise ValueError(
            f"{group}.solver: {values['solver']!r} is none of null, {', '.join(SOLVERS)}"
        )


def _part(cls: type[Any], keys: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The values of ``cls`` among the keys of ``serve``, each of its declared type."""
    data = {field: keys[key] for key, field in names.items()}
    return checked("serve", cls, data)


def _workload(data: dict[str, Any]) -> tuple[str, str, str | None]:
    """Name, source and path."""
    path = data.get("path")
    if data.get("task") is not None:
        raise ValueError(f"workload.task: {data['task']!r} applies to mode=offline only")
    if path is not None:
        return Path(typed("workload.path", str, path)).stem, "path", path
    return str(data.get("name")), typed("workload.source", str, data.get("source")), None


def _machines(
    config: Mapping[str, object], keys: Mapping[str, Any]
) -> tuple[tuple[HardwareProfile, ...], tuple[PowerModel, ...]]:
    """The machines of ``fleet``, or ``hardware`` alone, under their power caps."""
    fleet = group_of(config, "fleet") or {"hardware": group_of(config, "hardware")}
    caps = keys["cap_watts"]
    if not isinstance(caps, Mapping):
        caps = dict.fromkeys(fleet, typed("serve.cap_watts", float | None, caps))
    for key in caps:
        if key not in fleet:
            raise ValueError(unknown_key("serve.cap_watts", key, fleet))
    constants = {field: typed(f"serve.{key}", float, keys[key])
                 for key, field in _POWER_KEYS.items()}  # fmt: skip
    machines, models = [], []
    for key, data in fleet.items():
        profile = hardware_from_mapping(data)
        cap = caps.get(key)
        if cap is not None:
            cap = typed(f"serve.cap_watts.{key}", float, cap) * profile.n_gpus
        own = constants | {"context_watts": constants["context_watts"] * profile.n_gpus}
        power = PowerModel(
            profile.idle_watts, profile.tdp_watts, max(profile.gemm.y), cap_watts=cap, **own
        )
        profile = capped(profile, power)
        machines.append(profile)
        models.append(power)
    return tuple(machines), tuple(models)
