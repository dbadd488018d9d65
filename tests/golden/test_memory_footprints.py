"""MEM-1..6: TightLLM's six footprints (grade exact), and what they leave out."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from policies.cost.footprint import GIB, exact_footprint, paper_footprint
from policies.spec.model import ModelSpec

CONF = Path(__file__).parents[2] / "conf" / "model"
PUBLISHED = [  # model, sequences, prompt tokens, printed "GB"
    ("opt-30b", 8, 512, 61),
    ("opt-30b", 8, 8192, 140),
    ("opt-30b", 4, 2048, 66),
    ("opt-30b", 64, 2048, 225),
    ("opt-175b", 8, 512, 343),
    ("opt-175b", 8, 8192, 614),
]


def load(name: str) -> ModelSpec:
    return ModelSpec(**yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8")))


@pytest.mark.parametrize(("name", "n_seqs", "n_tokens", "printed"), PUBLISHED)
def test_printed_footprints_are_exact(name, n_seqs, n_tokens, printed):
    assert paper_footprint(load(name), n_seqs, n_tokens).whole_gib == printed


def test_components_of_one_footprint():
    found = paper_footprint(load("opt-30b"), 64, 2048)
    parts = (found.weight_bytes, found.kv_bytes, found.hidden_bytes, found.total_bytes)
    assert [round(p / GIB, 3) for p in parts] == [55.803, 168.0, 1.75, 225.553]


@pytest.mark.parametrize(("name", "n_seqs", "n_tokens", "printed"), PUBLISHED)
def test_exact_count_differs_by_the_position_table_and_norms_only(name, n_seqs, n_tokens, printed):
    model = load(name)
    exact, paper = (
        exact_footprint(model, n_seqs, n_tokens),
        paper_footprint(model, n_seqs, n_tokens),
    )
    assert exact.kv_bytes == paper.kv_bytes
    assert exact.hidden_bytes == paper.hidden_bytes
    d, layers = model.d_model, model.n_layers
    missing = 2 * (model.learned_positions * d + layers * 2 * d + 2 * d - model.vocab)
    assert exact.weight_bytes - paper.weight_bytes == missing


def test_decimal_gigabytes_would_not_match():
    found = paper_footprint(load("opt-30b"), 8, 512)
    assert found.total_bytes // 10**9 == 65


def test_formula_refuses_other_shapes():
    opt = load("opt-30b")
    for other in (load("llama2-13b"), load("llama2-70b"), replace(opt, weight_bytes_per_elem=1.0)):
        with pytest.raises(ValueError, match="shape"):
            paper_footprint(other, 8, 512)
    assert exact_footprint(load("llama2-70b"), 1, 1).kv_bytes == 327_680


@pytest.mark.parametrize("count", [paper_footprint, exact_footprint])
def test_sizes_must_be_positive(count):
    with pytest.raises(ValueError, match="n_seqs: 0"):
        count(load("opt-30b"), 0, 512)
    with pytest.raises(ValueError, match="n_tokens: -1"):
        count(load("opt-30b"), 8, -1)
