"""The experiments on serving and kappa: every one runs when shrunk and draws its figures."""

from itertools import product

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from experiments import style
from experiments.callback import draw_figure
from experiments.load import load_sweep
from experiments.table import comparison
from sim.mode_keys import mode_of
from sim.modes import run_in_sweep
from tests.serving_table import CONF

SHRUNK = {  # experiment: values to keep of each key (1 where not said), and what makes a run small
    "kappa": ({"model": 2, "hardware": 2}, []),
    "kappa-load": ({"workload": 2, "serve.rate": 2}, ["serve.limit=60"]),
    "serve-policies": ({"prefix": 3, "admission": 2, "hardware": 2}, ["serve.limit=30"]),
    "interconnect": ({"hardware.h2d.bytes_per_s": 3, "workload": 2}, ["serve.limit=30"]),
    "routing": ({"routing": 2, "serve.rate": 2, "serve.cap_watts": 2}, ["serve.limit=30"]),
}


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Few pixels: tests look at what is drawn, not at how sharp it is."""
    monkeypatch.setattr(style, "DPI", 40)


def composed(*overrides, with_hydra=False):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose("config", list(overrides), return_hydra_config=with_hydra)


@pytest.mark.parametrize("name", SHRUNK)
def test_runs_when_shrunk(name, tmp_path):
    keep, small = SHRUNK[name]
    hydra = composed(f"+experiment={name}", with_hydra=True).hydra
    assert hydra.mode.name == "MULTIRUN"
    swept = [f"{key}={value}" for key, value in hydra.sweeper.params.items()]
    kept = []
    for override in OverridesParser.create().parse_overrides(swept):
        key = str(override.input_line).partition("=")[0]
        values = list(override.sweep_string_iterator())
        assert len(values) == len(set(values)) > 1
        if (CONF / key).is_dir():
            assert set(values) <= {path.stem for path in (CONF / key).glob("*.yaml")}
        kept.append([f"{key}={value}" for value in values[: keep.get(key, 1)]])
    for i, cell in enumerate(product(*kept)):
        overrides = [f"+experiment={name}", *cell, *small]
        config = OmegaConf.to_container(composed(*overrides), resolve=True)
        folder = tmp_path / str(i)
        (folder / ".hydra").mkdir(parents=True)
        (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
        status, _ = run_in_sweep(mode_of(config), config, overrides, folder, str(i), {})
        assert status == "ok", overrides
    results = load_sweep(tmp_path)
    assert comparison(results, name, 120).row_count == len(results)
    for figure in hydra.callbacks.aggregate.figures:
        draw_figure(figure, results, tmp_path, tmp_path / f"{figure}.png")
        assert (tmp_path / f"{figure}.png").exists()
