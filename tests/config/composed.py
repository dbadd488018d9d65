"""Compositions of the shipped configuration, as the command line makes them."""

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

CONF = Path(__file__).parents[2] / "conf"


def options(group: str) -> list[str]:
    """Names in a config group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def composed(*overrides: str) -> dict[str, Any]:
    """Resolved configuration under these overrides."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
    assert isinstance(config, dict)
    return config
