"""Traces: reading, errors that say where, stratified samples, generators against statistics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.spec.workload import Lengths
from sim.lengths import LengthTrace, read_trace, stratified
from sim.quantiles import PROBABILITIES, LengthTable, Pair
from sim.workloads import GENERATED, generate, shipped, table

HEADER = "prompt_tokens,response_tokens,cached_prefix_tokens\n"


def csv_file(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_offline_lengths_by_hand(tmp_path: Path) -> None:
    trace = read_trace(csv_file(tmp_path, HEADER + "18,116,0\n0,0,134\n"))
    assert trace.offline() == [Lengths(19, 116), Lengths(135, 1)]
    assert trace.n_zero_responses == 1
    assert trace.kappa_ratio.tolist() == [0.0, 134.0]


def test_null_or_absent_prefix_is_unknown(tmp_path: Path) -> None:
    some = read_trace(csv_file(tmp_path, HEADER + "4,5,\n4,5,6\n"))
    assert (some.cached_prefix_tokens.tolist(), some.n_unknown_prefix) == ([0, 6], 1)
    none = read_trace(csv_file(tmp_path, "prompt_tokens,response_tokens\n4,5\n"))
    assert (none.cached_prefix_tokens.tolist(), none.n_unknown_prefix) == ([0], 1)


@pytest.mark.parametrize("prefix", [[1, 2], [None, 2], [None, None], [1.0, 2.0]])
def test_parquet_equals_csv(tmp_path: Path, prefix: list[float | None]) -> None:
    frame = pd.DataFrame({"prompt_tokens": [3, 4], "response_tokens": [5, 6]})
    frame["cached_prefix_tokens"] = prefix
    frame.to_parquet(tmp_path / "trace.parquet")
    rows = "".join(
        f"{p},{r},{'' if k is None else int(k)}\n"
        for p, r, k in zip([3, 4], [5, 6], prefix, strict=True)
    )
    expected = read_trace(csv_file(tmp_path, HEADER + rows))
    found = read_trace(tmp_path / "trace.parquet")
    assert found.offline() == expected.offline()
    assert found.n_unknown_prefix == expected.n_unknown_prefix == prefix.count(None)


def test_task_filter(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "task,prompt_tokens,response_tokens\n0,1,2\n3,3,4\n0,5,6\n")
    assert read_trace(path, "translation").prompt_tokens.tolist() == [1, 5]
    assert read_trace(path, "summarisation").n_other_tasks == 2
    assert len(read_trace(path)) == 3
    with pytest.raises(ValueError, match="column task: no row of extraction, it has tasks 0, 3"):
        read_trace(path, "extraction")
    with pytest.raises(ValueError, match="task: 'poetry' must be one of translation, "):
        read_trace(path, "poetry")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace.csv: is empty"),
        (HEADER, "trace.csv: is empty, it has a header but no rows"),
        ("prompt_tokens,tokens\n1,2\n", "column 'response_tokens' is missing, it has prompt_tok"),
        ("prompt_tokens,prompt_tokens\n1,2\n", "line 1: a column name is repeated"),
        (HEADER + "1,2,3\n4,5\n", r"line 3: 2 fields, the header has 3 \(cut off"),
        (HEADER + "1,2,3,4\n", "line 2: 4 fields, the header has 3"),
        (HEADER + '1,2,3\n4,"5', "line 3: unexpected end of data"),
        (HEADER + "1,-2,3\n", "line 2, column response_tokens: '-2' must be an integer in 0.."),
        (HEADER + "1,2,3\n\n1.5,2,3\n", "line 4, column prompt_tokens: '1.5' must be"),
        (HEADER + "1_0,2,3\n", "line 2, column prompt_tokens: '1_0' must be"),
        (HEADER + ",2,3\n", "line 2, column prompt_tokens: '' must be"),
        (HEADER + "4294967296,2,3\n", "column prompt_tokens: '4294967296' must be"),
        (HEADER + "1,2,x\n", "line 2, column cached_prefix_tokens: 'x' must be"),
    ],
)
def test_bad_csv_names_file_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_trace(csv_file(tmp_path, text))
    assert "trace.csv" in str(caught.value)


def test_csv_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(HEADER.encode() + b"1,2,\xff\n")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_trace(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, -4], "column prompt_tokens, row 2: -4 must be an integer"),
        ([1.0, 2.5], "row 2: 2.5 must be an integer"),
        ([1.0, None], "row 2: null must be an integer"),
        ([2**40, 1], "row 1: 1099511627776 must be an integer in 0..2147483647"),
        (["a", "b"], "column prompt_tokens: has type .* must be an integer type"),
    ],
)
def test_bad_parquet_names_row_and_column(tmp_path: Path, values: list, message: str) -> None:
    path = tmp_path / "trace.parquet"
    pd.DataFrame({"prompt_tokens": values, "response_tokens": [1, 1]}).to_parquet(path)
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def test_parquet_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    pd.DataFrame({"prompt_tokens": [1], "response_tokens": [1]}).to_parquet(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"trace\.parquet: is not a readable Parquet file"):
        read_trace(path)


def test_path_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no.csv: does not exist"):
        read_trace(tmp_path / "no.csv")
    with pytest.raises(ValueError, match=r"extension '.json' must be one of .csv, .parquet"):
        read_trace(tmp_path / "no.json")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ValueError, match=r"folder.csv: is not a file"):
        read_trace(tmp_path / "folder.csv")


# ---- stratified sample --------------------------------------------------------------------

many = st.lists(st.builds(Lengths, st.integers(1, 99), st.integers(1, 9)), min_size=1, max_size=80)


@given(many, st.integers(1, 90), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_stratified_draws_one_of_each_run_in_any_order(lengths, limit, seed, shuffler) -> None:
    def key(r: Lengths) -> tuple[int, int]:
        return (r.prompt_tokens, r.response_tokens)

    sample = stratified(lengths, limit, seed)
    shuffled = list(lengths)
    shuffler.shuffle(shuffled)
    assert stratified(shuffled, limit, seed) == sample
    ordered = sorted(lengths, key=key)
    if limit >= len(lengths):
        assert sample == ordered
        return
    assert len(sample) == limit
    for i, request in enumerate(sample):
        low, high = i * len(ordered) // limit, (i + 1) * len(ordered) // limit
        assert key(ordered[low]) <= key(request) <= key(ordered[high - 1])


def test_stratified_limits_and_seeds() -> None:
    lengths = [Lengths(i + 1, 1) for i in range(500)]
    assert stratified(lengths, None, 0) == lengths
    assert stratified(lengths, 64, 1) != stratified(lengths, 64, 2)
    sample = [r.prompt_tokens for r in stratified(lengths, 50, 7)]
    assert np.mean(sample) == pytest.approx(250.5, rel=0.02)
    with pytest.raises(ValueError, match="limit: 0 must be >= 1"):
        stratified(lengths, 0, 0)


# ---- shipped sample and generators --------------------------------------------------------


def test_shipped_sharegpt_has_the_statistics_of_the_trace() -> None:
    trace = shipped("sharegpt")
    assert len(trace) == 3_032
    assert np.mean(trace.prompt_tokens < 19) == pytest.approx(0.515, abs=0.02)  # T < 20
    assert np.mean(trace.response_tokens) == pytest.approx(279.7, rel=0.03)
    assert np.median(trace.cached_prefix_tokens) == pytest.approx(1_670, rel=0.05)
    with pytest.raises(ValueError, match="name: 'x' must be one of sharegpt"):
        shipped("x")


@pytest.mark.parametrize(
    ("name", "document", "kappa", "iqr", "prompt", "response"),
    [
        ("narrativeqa", 57_000, 5_083, (3_359, 8_309), 11.1, 6.2),
        ("finqa", 166_800, 9_627, (5_232, 16_667), 21.0, 13.8),
    ],
)
def test_generated_documents_match_the_published_statistics(
    name: str,
    document: float,
    kappa: float,
    iqr: tuple[float, float],
    prompt: float,
    response: float,
) -> None:
    trace = generate(name, 100_000, seed=1)
    prefix = trace.cached_prefix_tokens
    documents = prefix[np.diff(prefix, prepend=0) != 0]
    assert np.median(documents) == pytest.approx(document, rel=0.05)
    assert np.median(trace.kappa_ratio) == pytest.approx(kappa, rel=0.05)
    assert np.quantile(trace.kappa_ratio, [0.25, 0.75]) == pytest.approx(iqr, rel=0.06)
    assert np.mean(trace.prompt_tokens) == pytest.approx(prompt, rel=0.01)
    assert np.mean(trace.response_tokens) == pytest.approx(response, rel=0.02)


@pytest.mark.parametrize(
    ("name", "prompt", "response"),
    [
        ("translation", (182, 411, 959), (212, 535, 1_331)),
        ("classification", (116, 281, 750), (1, 2, 4)),
        ("extraction", (354, 756, 1_723), (21, 48, 111)),
        ("summarisation", (125, 375, 1_309), (16, 25, 39)),
    ],
)
def test_generated_tasks_match_the_modelled_quantiles(name: str, prompt, response) -> None:
    trace = generate(name, 20_000, seed=2)
    for values, expected in ((trace.prompt_tokens, prompt), (trace.response_tokens, response)):
        assert np.quantile(values, [0.05, 0.5, 0.95]) == pytest.approx(expected, rel=0.04)
    assert not trace.cached_prefix_tokens.any()


def test_translation_is_a_ratio_of_its_input() -> None:
    trace = generate("translation", 20_000, seed=3)
    ratio = trace.response_tokens / (trace.prompt_tokens - 32)  # 32: the instruction
    assert np.median(ratio) == pytest.approx(1.41, rel=0.01)
    assert np.std(np.log(ratio)) == pytest.approx(0.08, abs=0.015)


@pytest.mark.parametrize("name", GENERATED)
def test_generators_are_seeded_and_default_to_the_size_of_the_source(name: str) -> None:
    first, again, other = generate(name, 50, 1), generate(name, 50, 1), generate(name, 50, 2)
    assert first.offline() == again.offline() != other.offline()
    assert len(first) == 50
    assert len(generate(name)) == table(name).n_requests


def test_generate_names_the_bad_field() -> None:
    with pytest.raises(ValueError, match="name: 'x' must be one of narrativeqa, finqa"):
        generate("x")
    with pytest.raises(ValueError, match="n: 0 must be >= 1"):
        generate("finqa", 0)


# ---- quantile tables ----------------------------------------------------------------------


@given(st.floats(-0.95, 0.95), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_draws_keep_the_rank_correlation(rho: float, seed: int) -> None:
    ramp = tuple(round(1_000 * p) for p in PROBABILITIES)
    x, y = Pair(ramp, ramp, rho).draw(4_000, np.random.default_rng(seed))
    found = np.corrcoef(pd.Series(x).rank(), pd.Series(y).rank())[0, 1]
    assert found == pytest.approx(rho, abs=0.07)


def test_table_of_draws_is_the_table() -> None:
    known = table("narrativeqa")
    trace = known.draw("again", 60_000, np.random.default_rng(0))
    ids = np.cumsum(np.diff(trace.cached_prefix_tokens, prepend=0) != 0)
    again = LengthTable.of(trace, ids)
    assert known.documents is not None
    assert again.documents is not None
    assert again.requests.rank_correlation == pytest.approx(
        known.requests.rank_correlation, abs=0.02
    )
    middle = slice(12, -12)
    assert np.allclose(again.documents.first[middle], known.documents.first[middle], rtol=0.1)
    assert np.allclose(again.documents.second[middle], known.documents.second[middle], atol=1)
    assert LengthTable.from_json(again.to_json()) == again


def test_table_errors() -> None:
    trace = LengthTrace("t", np.array([1]), np.array([9]), np.array([1]))
    with pytest.raises(ValueError, match="needs a column document_id"):
        LengthTable.of(trace, None)
    ramp = tuple(range(len(PROBABILITIES)))
    with pytest.raises(ValueError, match="second: quantiles must be >= 0 and must not decrease"):
        Pair(ramp, ramp[::-1], 0.0)
    with pytest.raises(ValueError, match="first: has 3 quantiles"):
        Pair((1, 2, 3), ramp, 0.0)
    with pytest.raises(ValueError, match=r"rank_correlation: 1.5 must be in \[-1, 1\]"):
        Pair(ramp, ramp, 1.5)


def test_trace_refuses_columns_of_different_length() -> None:
    with pytest.raises(ValueError, match="response_tokens: has 1 rows, prompt_tokens has 2"):
        LengthTrace("t", np.array([1, 2]), np.array([0, 0]), np.array([1]))
