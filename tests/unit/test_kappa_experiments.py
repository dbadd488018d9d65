"""The experiments on serving and kappa: every one runs when shrunk and draws its figures."""

from itertools import product

import pytest
import yaml
from omegaconf import OmegaConf

from experiments.callback import draw_figure
from experiments.load import load_sweep
from experiments.table import comparison
from sim.mode_keys import mode_of
from sim.modes import run_in_sweep
from tests.sweeps import CONF, composed, varied
from tests.sweeps import coarse as coarse

SHRUNK = {  # experiment: values to keep of each key (1 where not said), and what makes a run small
    "kappa": ({"model": 2, "hardware": 2}, []),
    "kappa-load": ({"workload": 2, "serve.rate": 2}, ["serve.limit=60"]),
    "serve-policies": ({"prefix": 3, "admission": 2, "hardware": 2}, ["serve.limit=30"]),
    "interconnect": ({"hardware.h2d.bytes_per_s": 3, "workload": 2}, ["serve.limit=30"]),
    "routing": ({"routing": 2, "serve.rate": 2, "serve.cap_watts": 2}, ["serve.limit=30"]),
}


@pytest.mark.parametrize("name", SHRUNK)
def test_runs_when_shrunk(name, tmp_path):
    keep, small = SHRUNK[name]
    hydra = composed(f"+experiment={name}", with_hydra=True).hydra
    assert hydra.mode.name == "MULTIRUN"
    kept = []
    for key, values in varied(name).items():
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
