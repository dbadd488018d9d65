"""Runs of a sweep as the command line makes them, and rows like those that come of them."""

from functools import lru_cache
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from experiments import style
from sim.files import write_run
from sim.result import RunRecord
from sim.run import simulate
from sim.settings import build

CONF = Path(__file__).parents[1] / "conf"
VARIANTS = ["tightllm-no-both", "tightllm-no-distributor", "tightllm-no-loader", "tightllm"]
BASELINES = ["accelerate", "flexgen", "tightllm"]


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Few pixels: tests look at what is drawn, not at how sharp it is."""
    monkeypatch.setattr(style, "DPI", 40)


@lru_cache
def composed(*overrides: str, with_hydra: bool = False):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose("config", list(overrides), return_hydra_config=with_hydra)


def varied(experiment: str, where: str = "all") -> dict[str, list[str]]:
    """Keys that an experiment varies and their values: between its ``jobs`` or ``all``."""
    config = composed(f"+experiment={experiment}", with_hydra=True)
    swept = {**(config.hydra.sweeper.params or {}), **((where == "all" and config.grid) or {})}
    found = {}
    for override in OverridesParser.create().parse_overrides(
        [f"{k}={v}" for k, v in swept.items()]
    ):
        name = str(override.input_line).partition("=")[0]
        found[name] = list(override.sweep_string_iterator())
    return found


def settings(*overrides: str) -> dict[str, object]:
    return OmegaConf.to_container(composed(*overrides), resolve=True)


def run_cell(folder: Path, overrides: list[str]) -> None:
    """One run as the command line makes it in a sweep, Hydra's own files included."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    config = settings(*overrides)
    choices = {group: config[group]["name"] for group in ("policy", "model", "hardware")}
    note = {"hydra": {"runtime": {"choices": choices}}}
    (folder / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(note))
    write_run(folder, simulate(build(config, overrides)), config, {})


def cell(policy: str, prompt_len: int, *more: str) -> list[str]:
    return [f"policy={policy}", f"workload.prompt_len={prompt_len}", "model=tiny",
            "workload=fixed", "workload.gen_len=3", "workload.batch_size=2",
            *(more or ("hardware.gpu_bytes=25769803776",))]  # fmt: skip


def frame(**columns) -> pd.DataFrame:
    """A row a combination of the listed values, with plausible results."""
    lists = {name: value for name, value in columns.items() if isinstance(value, list)}
    rows = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
    base = {**RunRecord("p", "opt-30b", 48, "a800", "fixed").as_row(), "bottleneck": "disk"}
    base |= {"n_requests": 8, "n_batches": 4, "batch_size": 2, "prompt_len": 512, "max_new": 64}
    out = pd.DataFrame([{**base, "run": str(i), **row} for i, row in enumerate(rows)])
    sources = ("n_load", "n_project", "n_recompute", "n_cpu", "n_resident")
    for i, name in enumerate(sources):
        out[f"{name}_mean"] = [100.0 * (n % (i + 2)) + 1.0 for n in range(len(out))]
    for i, name in enumerate(("prefill_tokens_per_s", "decode_tokens_per_s", "makespan_s")):
        out[name] = [10.0 ** (i + 1) * (1 + n % 5) for n in range(len(out))]
    return out
