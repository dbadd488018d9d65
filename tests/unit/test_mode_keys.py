"""What the user sets and a mode does not read is refused; what was shipped still composes."""

import pytest
import yaml

from sim import mode_keys
from sim.cells import expand
from sim.files import AROUND
from sim.mode_keys import MODES, refuse_unread
from tests.config.composed import CONF


@pytest.mark.parametrize(
    ("mode", "override", "message"),
    [
        ("serve", "policy.n_slices=3", r"policy.n_slices: .*only mode=offline; .*prefix"),
        ("serve", "policy=flexgen", r"policy: mode=serve does not read it"),
        ("serve", "engine=auto", r"engine: mode=serve .* only mode=offline"),
        ("serve", "+step=3-zigzag", r"step: "),
        ("serve", "+workload.n_generated=3", r"workload.n_generated: .* name, source, path$"),
        ("serve", "export.dir=x", r"export.dir: "),
        ("phase", "++belief.h2d.bytes_per_s=1e9", r"belief.h2d.bytes_per_s: .*mode=serve"),
        ("phase", "policy=flexgen", r"policy: mode=phase"),
        ("phase", "seed=3", r"seed: "),
        ("phase", "workload.gen_len=9", r"workload.gen_len: .* prompt_len"),
        ("kappa", "workload=fixed", r"workload: .* mode=offline and mode=serve and mode=phase"),
        ("kappa", "serve.rate=3", r"serve.rate: .* only mode=serve"),
        ("offline", "serve.rate=3", r"serve.rate: .* only mode=serve"),
        ("offline", "hardware@fleet.a=h200", r"fleet.a: "),
        ("offline", "phase.weights=resident", r"phase.weights: .* only mode=phase"),
    ],
)
def test_what_a_mode_does_not_read_is_refused(mode, override, message):
    with pytest.raises(ValueError, match=message):
        refuse_unread(mode, {}, ["model=tiny", override])


def test_so_is_what_an_experiment_file_set_and_hardware_beside_a_fleet():
    with pytest.raises(ValueError, match=r"belief: mode=phase does not read it"):
        refuse_unread("phase", {"belief": {"h2d": {"bytes_per_s": 1.0}}}, [])
    with pytest.raises(ValueError, match=r"advise: mode=serve does not read it"):
        refuse_unread("serve", {"advise": {"tries": 1}}, [])
    for mode in ("offline", "kappa", "serve"):
        with pytest.raises(ValueError, match=r"phase: mode=.* only mode=phase"):
            refuse_unread(mode, {"phase": {"weights": "resident"}}, [])
    with pytest.raises(ValueError, match=r"hardware: the machines are those of fleet"):
        refuse_unread("serve", {"fleet": {"a": {}}}, ["hardware=h200"])


def test_the_defaults_are_those_of_the_configuration_and_every_key_is_known():
    shipped = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
    del shipped["defaults"], shipped["hydra"]
    groups = {path.name for path in CONF.iterdir() if path.is_dir()} - {"hydra", "__pycache__"}
    read = {key for keys in mode_keys._READ.values() for key in keys}
    by_every_mode = {"mode", *groups} | (set(AROUND) - read)
    assert {k: v for k, v in shipped.items() if k not in by_every_mode} == mode_keys._DEFAULTS
    assert groups <= read | set(AROUND)
    assert set(shipped) <= set(mode_keys.KEYS) <= groups | set(shipped)


def test_shipped_experiments_set_only_what_their_mode_reads():
    paths = sorted((CONF / "experiment").glob("*.yaml"))
    modes = set()
    for path in paths:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        mode = config.get("mode", "offline")
        params = [f"{key}=x" for key in config["hydra"].get("sweeper", {}).get("params", {})]
        cells = [text for cell in expand(config.get("grid")) for text in cell]
        refuse_unread(mode, config, [f"+experiment={path.stem}", *params, *cells])
        modes.add(mode)
    assert modes == set(MODES)
