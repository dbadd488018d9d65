"""``python -m sim.kappa model=NAME hardware=NAME``: when a cached prefix is transfer-bound.

Prints kappa_M, kappa_HW and kappa_crit in every variant and what other links and caches would
change. Nothing is simulated here; ``+experiment=kappa`` finds kappa_crit with the simulator.
"""

from __future__ import annotations

import os
import sys
from typing import cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from policies.spec.hardware_build import hardware_from_mapping
from sim.__main__ import CONF, WorkingFolder
from sim.kappa_report import print_kappa
from sim.settings import explain, group_of, model_of


def main() -> int:
    """Exit code: 0, or 2 where the command is wrong."""
    wants_trace = os.environ.setdefault("HYDRA_FULL_ERROR", "0") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"
    Plugins.instance().register(WorkingFolder)

    def task(composed: DictConfig) -> None:
        config = cast(dict[str, object], OmegaConf.to_container(composed, resolve=True))
        overrides = list(HydraConfig.get().overrides.task)
        model = model_of(group_of(config, "model"), overrides)
        hardware = hardware_from_mapping(group_of(config, "hardware"))
        print_kappa(model, hardware, Console())

    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    except Exception as error:
        message = explain(error)
        if message is None or wants_trace:
            raise
        sys.stderr.write(f"error: {message}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
