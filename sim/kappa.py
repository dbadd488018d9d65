"""``python -m sim.kappa model=NAME hardware=NAME``: when a cached prefix is transfer-bound.

The same as ``python -m sim mode=kappa``: it prints kappa_M, kappa_HW and kappa_crit in every
variant and what other links and caches would change, and leaves a row with what the simulator finds
by bisection.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from policies.spec.hardware_file import SHIPPED
from sim import modes
from sim.__main__ import WorkingFolder
from sim.mode_keys import KAPPA, OFFLINE
from sim.settings import explain


def main() -> int:
    """Exit code: 0, or 2 where the command is wrong."""
    wants_trace = os.environ.setdefault("HYDRA_FULL_ERROR", "0") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"
    Plugins.instance().register(WorkingFolder)

    def task(composed: DictConfig) -> None:
        config = cast(dict[str, object], OmegaConf.to_container(composed, resolve=True))
        settings = HydraConfig.get()
        overrides, folder = list(settings.overrides.task), Path(settings.runtime.output_dir)
        if config["mode"] not in (OFFLINE, KAPPA):  # offline: the default of the configuration
            raise ValueError(f"mode: {config['mode']!r} must be {KAPPA}, or not set, in sim.kappa")
        modes.run_alone(KAPPA, config, overrides, folder)

    try:
        hydra.main(version_base="1.3", config_path=str(SHIPPED), config_name="config")(task)()
    except Exception as error:
        message = explain(error)
        if message is None or wants_trace:
            raise
        sys.stderr.write(f"error: {message}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
