"""From a composed configuration to the frozen dataclasses of a run, and from what is wrong with it
to one line that says so.

What readers get wrong: a configuration key that nothing reads is not harmless, it is a setting that
somebody believes in. Unknown keys are refused, at every level, with the keys that exist.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.errors import (
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.utils import instantiate
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from policies.drive import Policy
from policies.errors import error_text
from policies.spec.hardware import HardwareProfile
from policies.spec.hardware_build import hardware_from_mapping
from policies.spec.model import ModelSpec
from policies.spec.model_hf import load_hf_config
from policies.typed import checked, is_of, nearest, typed, unknown_key, whole_hint
from sim.job import WorkloadSpec
from sim.mode_keys import KEYS, OFFLINE, refuse_unread
from sim.run import RunSpec

GROUPS = ("model", "hardware", "workload", "policy")


def build(config: Mapping[str, object], overrides: Collection[str]) -> RunSpec:
    """The run that a resolved configuration describes.

    ``overrides`` are the command line's: with ``model.from_hf`` they decide which fields of
    ``model`` win over the file. ``ValueError`` names the key, its value and what is allowed.
    """
    check_keys(OFFLINE, config, overrides)
    hardware = hardware_from_mapping(group_of(config, "hardware"))
    seed = typed("seed", int, config.get("seed", 0))
    if seed < 0:
        raise ValueError(f"seed: {seed} must be >= 0")
    return RunSpec(
        model=model_of(group_of(config, "model"), overrides),
        hardware=hardware,
        policy=_policy(group_of(config, "policy")),
        workload=_workload(group_of(config, "workload")),
        belief=belief_of(group_of(config, "hardware"), config.get("belief")),
        trace=typed("trace", str, config.get("trace", "auto")),
        engine=typed("engine", str, config.get("engine", "auto")),
        seed=seed,
    )


def check_keys(mode: str, config: Mapping[str, object], overrides: Collection[str]) -> None:
    """``ValueError`` for a key that no mode reads, and for one set that ``mode`` does not read."""
    for key in config:
        if key not in KEYS:
            raise ValueError(unknown_key("", key, KEYS))
    refuse_unread(mode, config, overrides)


def group_of(config: Mapping[str, object], name: str) -> dict[str, Any]:
    """A config group as a new dictionary; ``ValueError`` if it is none."""
    value = config.get(name)
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: {value!r} must be a mapping, as {name}=NAME gives")
    return {str(key): part for key, part in value.items()}


def model_of(data: dict[str, Any], overrides: Collection[str]) -> ModelSpec:
    """From ``data`` alone, or from a config.json and the fields that ``overrides`` name."""
    path = data.pop("from_hf", None)
    if path is None:
        return ModelSpec(**checked("model", ModelSpec, data))
    base = asdict(load_hf_config(typed("model.from_hf", str, path)))
    for override in overrides:
        group, _, field = override.partition("=")[0].lstrip("+~").partition(".")
        if group == "model" and field and field != "from_hf":
            base[field] = data.get(field)
    return ModelSpec(**checked("model", ModelSpec, base))


def _workload(data: dict[str, Any]) -> WorkloadSpec:
    size = data.get("batch_size")
    if size == "auto":
        data["batch_size"] = None
    elif size is not None and not is_of(int, size):
        raise ValueError(
            f"workload.batch_size: {size!r} must be a whole number or auto{whole_hint(size)}"
        )
    path = data.get("path")
    if data.get("task") is not None and path is None:
        raise ValueError(
            f"workload.task: {data['task']!r} selects rows of workload.path, which is null"
        )
    if path is not None:
        if data.get("n_generated") is not None:
            raise ValueError(
                f"workload.n_generated: {data['n_generated']} must be null with workload.path"
            )
        stem = Path(typed("workload.path", str, path)).stem
        data |= {"source": "path", "name": stem}
    return WorkloadSpec(**checked("workload", WorkloadSpec, data))


def _policy(data: dict[str, Any]) -> Policy:
    target = data.get("_target_")
    if not isinstance(target, str):
        raise ValueError(f"policy._target_: {target!r} must name a class, policies.flexgen.FlexGen")
    module, _, name = target.rpartition(".")
    try:
        cls: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"policy._target_: {target!r} cannot be imported ({error})") from error
    if not (isinstance(cls, type) and is_dataclass(cls)) or not hasattr(cls, "decide"):
        raise ValueError(f"policy._target_: {target!r} is no policy (a dataclass with decide())")
    values = {key: value for key, value in data.items() if key != "_target_"}
    checked("policy", cls, values)
    try:
        return cast(Policy, instantiate(data, _convert_="all"))
    except InstantiationException as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise


def belief_of(hardware: dict[str, Any], belief: object) -> HardwareProfile | None:
    """The profile with the numbers of ``belief`` in place of its own; None if there are none."""
    if belief is None or belief == {}:
        return None
    if not isinstance(belief, Mapping):
        raise ValueError(f"belief: {belief!r} must be null or a mapping of hardware numbers")
    believed = _merged("belief", hardware, belief)
    try:
        return hardware_from_mapping(believed)
    except ValueError as error:
        raise ValueError(f"belief{str(error).removeprefix('hardware')}") from error


def _merged(root: str, base: Mapping[str, Any], over: Mapping[Any, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if key not in base:
            raise ValueError(unknown_key(root, key, base))
        nested = isinstance(value, Mapping) and isinstance(base[key], Mapping)
        merged[key] = _merged(f"{root}.{key}", base[key], value) if nested else value
    return merged


# ---- messages ------------------------------------------------------------------------------------


def explain(error: BaseException) -> str | None:
    """One line for an error that a user can cause; None for one that is a defect of the program."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_option(error)
    if isinstance(error, OverrideParseException):
        reason = str(error).partition("See https://")[0]
        return f"{error.override!r} cannot be read as KEY=VALUE: {' '.join(reason.split())}"
    causes = (error, error.__cause__)
    for cause in causes:
        if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
            parent = cause.parent_node
            if cause.full_key and cause.key not in parent:
                root = str(cause.full_key).rpartition(".")[0]
                if root == "belief" and not len(parent):
                    return (
                        f"{cause.full_key}: belief is empty, add to it with a +, +belief.KEY=VALUE"
                    )
                return unknown_key(root, cause.key, parent.keys())
    if isinstance(error, HydraException | OmegaConfBaseException):
        details = [str(cause) for cause in causes if cause is not None]
        return " ".join(" ".join(details).split())
    if isinstance(error, yaml.YAMLError):
        return " ".join(str(error).split())  # it names file, line and column
    return error_text(error) if isinstance(error, OSError | ValueError) else None


def _unknown_option(error: MissingConfigException) -> str:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    names = sorted(str(option) for option in error.options or ())
    extras = "; extras [joblib], [ray] and [slurm] bring more" if group == "hydra/launcher" else ""
    if not names:
        return f"{group or 'config'}: {name!r} does not exist, nor does any other {group}{extras}"
    close, there = nearest(name, names), ", ".join(names)
    return f"{group}: {name!r} does not exist{close}; there are {there}{extras}"
