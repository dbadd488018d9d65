"""The modes of ``python -m sim``, and which settings each of them reads.

All modes share one configuration, so every group is composed whatever the mode. What readers get
wrong: a group of another mode that stands at its default is harmless, one that the user set is a
setting that somebody believes in; it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from sim.files import AROUND

OFFLINE, SERVE, KAPPA, PHASE = MODES = ("offline", "serve", "kappa", "phase")

_READ: dict[str, tuple[str, ...]] = {
    OFFLINE: (
        *("model", "hardware", "workload", "policy", "step", "machine"),
        *("seed", "trace", "engine", "belief", "advise", "export"),
    ),
    SERVE: (
        *("model", "hardware", "workload", "seed", "belief"),
        *("serve", "admission", "prefix", "routing", "fleet"),
    ),
    KAPPA: ("model", "hardware"),
    PHASE: ("model", "hardware", "workload", "machine", "phase"),
}
# Config files of these groups set others: step a policy, machine the hardware and the workload.
_COMPOSED_INTO = ("step", "machine")
KEYS = tuple(dict.fromkeys(
    key for key in ("mode", *(k for keys in _READ.values() for k in keys), *AROUND)
    if key not in _COMPOSED_INTO
))  # fmt: skip
_WORKLOAD_OF: dict[str, tuple[str, ...]] = {
    SERVE: ("name", "source", "path"),
    PHASE: ("name", "source", "n_batches", "batch_size", "prompt_len"),
}
# What conf/config.yaml has; another value came from an experiment file.
_DEFAULTS: dict[str, object] = {
    "seed": 0, "trace": "auto", "engine": "auto", "belief": None, "advise": None,
    "phase": {"weights": "streamed"},
    "export": {"dir": None, "steps_run": None, "dtype": "float16", "name": None},
}  # fmt: skip
_INSTEAD = {(SERVE, "trace"): "serve.log", (SERVE, "policy"): "admission, prefix and routing"}


def mode_of(config: Mapping[str, object]) -> str:
    """The mode of a configuration; ``ValueError`` for one that is none."""
    mode = config.get("mode", OFFLINE)
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r} is none of {', '.join(MODES)}")
    return str(mode)


def refuse_unread(mode: str, config: Mapping[str, object], overrides: Collection[str]) -> None:
    """``ValueError`` for a setting that the user made and ``mode`` does not read.

    ``overrides`` are the command line's and a cell's. Of what an experiment file set, single values
    are looked at: a group that it chose cannot be told from a default.
    """
    for override in overrides:
        key = _key(override)
        root, _, field = key.partition(".")
        if any(root in keys for keys in _READ.values()) and root not in _READ[mode]:
            _refuse(mode, root, key)
        fields = _WORKLOAD_OF.get(mode)
        if root == "workload" and field and fields is not None and field not in fields:
            own = config.get(mode)
            hint = f"; {mode}.{field} exists" if isinstance(own, Mapping) and field in own else ""
            raise ValueError(
                f"{key}: mode={mode} does not read it, of workload it reads "
                f"{', '.join(fields)}{hint}"
            )
        if root == "hardware" and mode == SERVE and config.get("fleet"):
            raise ValueError(
                f"{key}: the machines are those of fleet, which is set; fleet.NAME.FIELD=VALUE "
                "changes one of them"
            )
    for root, default in _DEFAULTS.items():
        value = config.get(root, default)
        if root not in _READ[mode] and value not in (default, {}):
            _refuse(mode, root, root)


def _key(override: str) -> str:
    """The key that an override sets: of ``hardware@fleet.a=NAME`` it is ``fleet.a``."""
    key = override.partition("=")[0].lstrip("+~")
    return re.split("[@:]", key)[-1]


def _refuse(mode: str, root: str, key: str) -> None:
    readers = " and ".join(f"mode={other}" for other in MODES if root in _READ[other])
    instead = _INSTEAD.get((mode, root))
    hint = f"; mode={mode} has {instead}" if instead else ""
    raise ValueError(f"{key}: mode={mode} does not read it, only {readers}{hint}")
