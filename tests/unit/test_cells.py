"""Grids become cells, and a cell is composed as the command line would compose it."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from sim.cells import Composer, expand
from sim.settings import explain

CONF = Path(__file__).parents[2] / "conf"
JOB = ("workload=fixed", "model=tiny", "workload.gen_len=3")


@pytest.fixture
def hydra():
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        yield


class TestExpand:
    def test_the_last_key_varies_fastest(self):
        cells = expand({"policy": "flexgen,tightllm", "workload.prompt_len": [16, 32]})
        assert cells == [
            ("policy=flexgen", "workload.prompt_len=16"),
            ("policy=flexgen", "workload.prompt_len=32"),
            ("policy=tightllm", "workload.prompt_len=16"),
            ("policy=tightllm", "workload.prompt_len=32"),
        ]

    def test_without_a_grid_there_is_one_cell(self):
        assert expand(None) == expand({}) == [()]

    @pytest.mark.parametrize(
        ("grid", "cells"),
        [
            ({"seed": "range(0,3)"}, [("seed=0",), ("seed=1",), ("seed=2",)]),
            ({"seed": "choice(4,5)"}, [("seed=4",), ("seed=5",)]),
            ({"seed": 7}, [("seed=7",)]),
            ({"policy": {"n_slices": [None, 2]}}, [("policy.n_slices=null",),
                                                   ("policy.n_slices=2",)]),
            ({"policy.percent": [[0, 100, 0, 100, 0, 100]]},
             [("policy.percent=[0, 100, 0, 100, 0, 100]",)]),
            ({"+step": "1-accelerate,3-zigzag"}, [("+step=1-accelerate",), ("+step=3-zigzag",)]),
        ],
    )  # fmt: skip
    def test_values_are_those_of_a_sweep(self, grid, cells):
        assert expand(grid) == cells

    def test_the_command_line_narrows_a_grid_as_it_narrows_a_sweep(self):
        grid = {"policy": "flexgen,tightllm", "seed": "1,2"}
        assert expand(grid, ["policy=tightllm"]) == [("seed=1",), ("seed=2",)]
        assert expand(grid, ["policy.name=x", "+seed=1"]) == [("policy=flexgen",),
                                                              ("policy=tightllm",)]  # fmt: skip

    @pytest.mark.parametrize(
        ("grid", "message"),
        [("policy=a", "grid: 'policy=a' must be null or a mapping"),
         ({"seed": []}, "grid.seed: is empty"),
         ({"seed": "interval(0, 1)"}, "grid.seed: 'interval\\(0, 1\\)' must be a list")],
    )  # fmt: skip
    def test_what_cannot_be_read_is_refused(self, grid, message):
        with pytest.raises(ValueError, match=message):
            expand(grid)


class TestComposer:
    @pytest.mark.parametrize(
        "cell",
        [
            ("policy=flexgen",),
            ("seed=5", "workload.prompt_len=99"),
            ("policy=tightllm", "policy.n_slices=3", "hardware=h200", "hardware.host_bytes=1e12"),
            ("hardware.gemm.y=[1e12,2e12]", "hardware.gemm.x=[1,2]"),
            ("+step=5-whole-layers", "trace=none"),
            ("+belief.h2d.bytes_per_s=1e9",),
            ("workload.batch_size=auto",),
            ("model={n_layers: 3}",),
            (),
        ],
    )
    def test_a_cell_is_what_the_command_line_composes(self, hydra, cell):
        composer = Composer(compose("config", list(JOB)), JOB)
        for other in (cell, ("workload.prompt_len=7", "seed=2"), cell):  # in any order
            expected = OmegaConf.to_container(compose("config", [*JOB, *other]), resolve=True)
            assert composer(other) == expected

    def test_an_unknown_key_costs_one_cell(self, hydra):
        composer = Composer(compose("config", list(JOB)), JOB)
        before = composer(())
        with pytest.raises(ConfigAttributeError) as error:
            composer(("seed=3", "workload.promptlen=7"))
        assert "workload.promptlen: unknown key" in explain(error.value)
        assert composer(()) == before
