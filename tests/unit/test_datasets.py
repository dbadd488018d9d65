"""Converters: tiny raw files through the command line, and every way in which they break."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import sim.sessions
from sim.columns import write_atomically
from sim.datasets import convert, load_tokenizer, main
from sim.lengths import read_trace


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """One token a word; adds a special token, truncates and pads unless told not to."""
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "[BOS]": 1}, unk_token="[UNK]"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing("[BOS] $A", None, [("[BOS]", 1)])
    made.enable_truncation(max_length=3)
    made.enable_padding(length=3)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


def words(n: int) -> str:
    return " ".join(["word"] * n)


def columns(path: Path) -> dict[str, list[int]]:
    frame = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    return {str(name): frame[name].tolist() for name in frame}


def talk(*messages: tuple[str, int]) -> dict[str, object]:
    return {"id": "x_0", "conversations": [{"from": f, "value": words(n)} for f, n in messages]}


def test_tokenizer_counts_text_only(tokenizer: Path) -> None:
    count = load_tokenizer(tokenizer)
    assert [count(words(n)) for n in (0, 1, 7)] == [0, 1, 7]
    with pytest.raises(UnicodeEncodeError):
        count("\ud800")


# ---- ShareGPT -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_sharegpt(tmp_path: Path, tokenizer: Path, name: str, capsys) -> None:
    raw, out = tmp_path / "raw.json", tmp_path / name
    records = [
        talk(("gpt", 9), ("system", 1), ("human", 2), ("gpt", 3), ("gpt", 1), ("human", 5)),
        talk(),
        talk(("gpt", 2)),
        talk(("human", 2), ("tool", 2)),
        {"conversations": [{"from": "human", "value": "\ud800"}]},
        talk(("human", 4), ("chatgpt", 6)),
    ]
    raw.write_text(json.dumps(records), encoding="utf-8")
    arguments = ["convert", "sharegpt", str(raw), "--tokenizer", str(tokenizer), "-o", str(out)]
    assert main(arguments) == 0
    assert columns(out) == {
        "conversation_id": [0, 0, 1],
        "turn_index": [0, 1, 0],
        "prompt_tokens": [3, 5, 4],
        "response_tokens": [4, 0, 6],
        "cached_prefix_tokens": [0, 7, 0],
    }
    printed = capsys.readouterr().out
    assert f"{name}: 3 requests" in printed
    for line in (
        "skipped: 2 assistant messages that open a conversation",
        "skipped: 2 conversations without a user message",
        "skipped: 1 conversations with an unknown sender",
        "skipped: 1 conversations with text that is not Unicode",
        "note: 1 turns without a response",
    ):
        assert line in printed
    assert [r.prompt_tokens for r in read_trace(out).offline()] == [4, 13, 5]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("[3]", r"record 0 \(byte 1\): is a int, must be an object"),
        ('[{"id": 1}]', "record 0 .*: key 'conversations' is missing, it has id"),
        ('[{"conversations": 5}]', "key 'conversations': is a int, must be a list"),
        ('[{"conversations": [{"from": "gpt"}]}]', "conversations: key 'value' is missing"),
        ('[{"conversations": [{"from": "gpt", "value": null}]}]', "key 'value': is a NoneType"),
        ("[]", "raw.json: no usable request"),
        ('{"a": 1}', r"byte 0: must start with '\['"),
        ("", r"byte 0: must start with '\['"),
    ],
)
def test_malformed_sharegpt(tmp_path, tokenizer, record, message) -> None:
    raw, out = tmp_path / "raw.json", tmp_path / "out.csv"
    raw.write_text(record, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        convert("sharegpt", raw, tokenizer, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["raw.json", "tokenizer.json"]


@pytest.mark.parametrize("command", [(), ("convert",), ("describe",)])
def test_help_lists_the_columns_of_a_trace_and_their_units(capsys, command) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    lines = {words_[0]: words_[1] for line in text.splitlines() if len(words_ := line.split()) > 1}
    read = ("prompt_tokens", "response_tokens", *sim.sessions._OPTIONAL)
    units = {name: lines[name] for name in (*read, "task", "hash_ids")}
    assert {unit for name, unit in units.items() if "_tokens" in name} == {"tokens"}
    assert units["arrival_ms"] == "ms"
    for name in ("turn_index", "question_index", "parent_request_id", "shared_blocks"):
        assert name in text


# ---- NarrativeQA and FinQA ----------------------------------------------------------------


def narrativeqa(folder: Path) -> Path:
    raw = folder / "narrativeqa"
    (raw / "tmp").mkdir(parents=True)
    (raw / "documents.csv").write_text(
        "document_id,set,kind,story_file_size\n"
        "aa,train,gutenberg,425060\nbb,test,movie,44325\ncc,test,movie,10\n"
    )
    (raw / "qaps.csv").write_text(
        "document_id,set,question,answer1,answer2\n"
        f'aa,train,{words(4)},"one, two",x\nbb,test,{words(3)},{words(5)},x\n'
        f"aa,train,{words(6)},{words(1)},x\nzz,test,{words(6)},{words(1)},x\nbb,test, ,x,x\n"
    )
    return raw


def test_narrativeqa(tmp_path: Path, tokenizer: Path, capsys) -> None:
    raw, out = narrativeqa(tmp_path), tmp_path / "out.parquet"
    (raw / "tmp" / "bb.content").write_bytes(words(77).encode() + b" \xff")
    arguments = ["convert", "narrativeqa", str(raw), "--tokenizer", str(tokenizer), "-o", str(out)]
    assert main(arguments) == 0
    assert columns(out) == {
        "document_id": [0, 1, 0],
        "question_index": [0, 0, 1],
        "prompt_tokens": [4, 3, 6],
        "response_tokens": [2, 5, 1],
        "cached_prefix_tokens": [100_000, 78, 100_000],
    }
    printed = capsys.readouterr().out
    for line in (
        "skipped: 1 questions without text",
        "skipped: 1 questions whose document is not in documents.csv",
        "skipped: 1 documents without questions",
        "note: 1 documents estimated from story_file_size",
        "note: 1 stories with bytes that are not UTF-8",
    ):
        assert line in printed


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("documents.csv", "gutenberg", "poem", "line 2, column kind: 'poem' must be one of"),
        ("documents.csv", "44325", "-5", "line 3, column story_file_size: '-5' must be"),
        ("documents.csv", "cc,", "aa,", "line 4, column document_id: 'aa' is repeated"),
        ("documents.csv", "kind", "type", "column 'kind' is missing"),
        ("qaps.csv", "answer1", "answer", "column 'answer1' is missing"),
    ],
)
def test_malformed_narrativeqa(tmp_path, tokenizer, capsys, name, old, new, message) -> None:
    raw = narrativeqa(tmp_path)
    path = raw / name
    path.write_text(path.read_text().replace(old, new))
    out = tmp_path / "out.csv"
    arguments = ["convert", "narrativeqa", str(raw), "--tokenizer", str(tokenizer), "-o", str(out)]
    assert main(arguments) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_finqa_and_docfinqa(tmp_path: Path, tokenizer: Path, capsys) -> None:
    page = {
        "pre_text": [words(3), words(2)],
        "table": [["a b", "c"], ["d", "e"]],  # "a b | c" and "d | e": 4 and 3 words
        "post_text": [words(1)],
        "id": "A/2009/page_1.pdf-1",
    }
    filing = {"Context": words(50), "Answer": 1.5}
    records = [
        page | {"qa": {"question": words(8), "program": words(4)}},
        filing | {"Question": words(7), "Program": words(2)},
        page | {"qa": {"question": words(9), "program": words(5)}},
        filing | {"Question": "", "Program": ""},
        filing | {"Context": " ", "Question": "a", "Program": ""},
    ]
    raw, out = tmp_path / "raw.json", tmp_path / "out.csv"
    raw.write_text(json.dumps(records))
    arguments = ["convert", "finqa", str(raw), "--tokenizer", str(tokenizer), "-o", str(out)]
    assert main(arguments) == 0
    assert columns(out) == {
        "document_id": [0, 1, 0],
        "question_index": [0, 0, 1],
        "prompt_tokens": [8, 7, 9],
        "response_tokens": [4, 2, 5],
        "cached_prefix_tokens": [13, 50, 13],
    }
    printed = capsys.readouterr().out
    assert "skipped: 1 records with an empty question" in printed
    assert "skipped: 1 records with an empty document" in printed

    raw.write_text(json.dumps([{**records[0], "table": [[1]]}]))
    assert main(arguments) == 1
    assert "record 0 (byte 1), key 'table': must be a list of strings" in capsys.readouterr().err


# ---- Mooncake and Azure -------------------------------------------------------------------


def request(at: int, n: int, blocks: list[int], out: int = 5) -> dict[str, object]:
    return {"timestamp": at, "input_length": n, "output_length": out, "hash_ids": blocks}


def test_mooncake(tmp_path: Path, capsys) -> None:
    raw, out = tmp_path / "raw.jsonl", tmp_path / "out.parquet"
    requests = [
        request(100, 1_100, [0, 1, 2]),
        request(100, 0, []),
        request(130, 2_000, [0, 1, 3, 4], 9),  # all of the first but its last block: a next turn
        request(200, 1_024, [0, 1]),  # all cached, yet one token is computed
        request(220, 700, [0, 9]),  # one shared block (a system prompt): a new session
    ]
    raw.write_text("".join(json.dumps(r) + "\n" for r in requests))
    assert main(["convert", "mooncake", str(raw), "-o", str(out)]) == 0
    found = columns(out)
    assert [list(map(int, b)) for b in found.pop("hash_ids")] == [
        [0, 1, 2],
        [0, 1, 3, 4],
        [0, 1],
        [0, 9],
    ]
    assert found == {
        "request_id": [0, 1, 2, 3],
        "arrival_ms": [0, 30, 100, 120],
        "conversation_id": [0, 0, 1, 2],
        "turn_index": [0, 1, 0, 0],
        "prompt_tokens": [1_100, 2_000 - 1_024, 1, 700 - 512],
        "response_tokens": [5, 9, 5, 5],
        "cached_prefix_tokens": [0, 1_024, 1_023, 512],
        "parent_request_id": [-1, 0, 1, 2],
        "shared_blocks": [0, 2, 2, 1],
    }
    assert "skipped: 1 requests with input_length 0" in capsys.readouterr().out
    assert main(["convert", "mooncake", str(raw), "-o", str(tmp_path / "out.csv")]) == 0
    assert "hash_ids" not in columns(tmp_path / "out.csv")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 1, "input_le', "line 2 (byte 79): is not JSON, the file is cut off"),
        (json.dumps(request(50, 5, [1])), "key 'timestamp': 50 is before 100 ms"),
        (json.dumps(request(100, -5, [])), "key 'input_length': -5 must be in 0.."),
        (json.dumps(request(100, 513, [1])), "has 1 blocks, input_length 513 needs 2"),
        (json.dumps(request(100, 5, ["x"])), "key 'hash_ids': 'x' must be in 0.."),  # type: ignore[list-item]
        ('{"timestamp": 100}', "key 'input_length' is missing"),
        ('{"timestamp": 1.5}', "key 'timestamp': is a float, must be a int"),
        ("[]", "is a list, must be an object"),
    ],
)
def test_malformed_mooncake(tmp_path: Path, capsys, line: str, message: str) -> None:
    raw = tmp_path / "raw.jsonl"
    first = json.dumps(request(100, 5, [0])) + "\n"
    raw.write_text(first + line)
    assert main(["convert", "mooncake", str(raw), "-o", str(tmp_path / "out.csv")]) == 1
    printed = capsys.readouterr().err
    assert message.replace("79", str(len(first))) in printed
    assert "line 2" in printed


def test_azure(tmp_path: Path, capsys) -> None:
    raw, out = tmp_path / "raw.csv", tmp_path / "out.csv"
    raw.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,0,3\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    arguments = ["convert", "azure", str(raw), "-o", str(out)]
    assert main(arguments) == 0
    assert columns(out) == {
        "request_id": [0, 1],
        "arrival_ms": [0, 4_315],
        "prompt_tokens": [374, 396],
        "response_tokens": [44, 109],
    }
    assert read_trace(out).n_unknown_prefix == 2
    assert "skipped: 1 requests with 0 ContextTokens" in capsys.readouterr().out
    text = raw.read_text()
    for old, new, message in (
        ("18:15:46", "19:15:46", "line 3, column TIMESTAMP: 2023-11-16 18:15:50.995169+00:00 is"),
        ("2023-11-16 18:15:46", "yesterday", "line 2, column TIMESTAMP: 'yesterday.6805900' must"),
        ("396", "-1", "line 4, column ContextTokens: '-1' must be an integer"),
        (",109\n", "\n", "line 4: 2 fields, the header has 3"),
        ("ContextTokens", "Context", "column 'ContextTokens' is missing"),
    ):
        raw.write_text(text.replace(old, new))
        assert main(arguments) == 1
        assert message in capsys.readouterr().err


# ---- command line -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("convert sharegpt no.json -o out.csv", "--tokenizer: sharegpt holds text"),
        ("convert azure no.csv -o out.csv --tokenizer t", "--tokenizer: azure holds token counts"),
        ("convert azure no.csv -o out.csv", "no.csv: does not exist"),
        ("convert azure no.csv -o out.txt", "extension '.txt' must be one of .csv, .parquet"),
        ("convert sharegpt no.json --tokenizer no -o out.csv", "--tokenizer: no does not exist"),
        ("convert narrativeqa no --tokenizer TOKENIZER -o out.csv", "no: must be a folder"),
        ("convert sharegpt no.json --tokenizer RAW -o out.csv", "is not a tokenizer JSON file"),
        ("describe nothing", "source: 'nothing' must be a path (.csv, .parquet) or one of"),
        ("describe sharegpt -n 5", "-n: 5 does not apply to sharegpt"),
        ("describe finqa --task extraction", "--task: extraction does not apply to finqa"),
        ("describe no.csv --seed 1", "--seed: 1 does not apply to no.csv"),
        ("tabulate no.csv -o out.csv", "extension '.csv' must be .json"),
    ],
)
def test_command_line_errors(tmp_path, tokenizer, monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").write_text("{}")
    paths = {"TOKENIZER": str(tokenizer), "RAW": "raw"}
    assert main([paths.get(word, word) for word in arguments.split()]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.out == ""


def test_describe_prints_the_statistics(tmp_path: Path, capsys) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("prompt_tokens,response_tokens\n" + "9,0\n" * 3 + "29,8\n")
    assert main(["describe", str(path)]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.strip()}
    assert rows["prompt"] == ["14", "9", "9", "9", "14", "26", "29"]
    assert rows["response"] == ["2", "0", "0", "0", "2", "6.8", "8"]
    assert "3 requests without a response (run offline as 1 token)" in printed
    assert "4 requests without information on reuse (K = 0)" in printed
    assert main(["describe", "finqa", "-n", "20", "--seed", "3"]) == 0
    assert "finqa (generated, seed 3): 20 requests" in capsys.readouterr().out


def test_tabulate_makes_a_table_that_draws_again(tmp_path: Path, capsys) -> None:
    path, out = tmp_path / "trace.csv", tmp_path / "table.json"
    rows = [f"{d},{p},{2 * p},{1000 * d + 1}\n" for d in range(4) for p in range(1, 6)]
    header = "document_id,prompt_tokens,response_tokens,cached_prefix_tokens\n"
    path.write_text(header + "".join(rows))
    assert main(["tabulate", str(path), "--source", "made up", "-o", str(out)]) == 0
    table = json.loads(out.read_text())
    assert (table["source"], table["n_requests"]) == ("made up", 20)
    assert set(table["documents"]["questions"]) == {5}
    assert set(table["documents"]["document_tokens"]) == {1, 1001, 2001, 3001}
    assert table["requests"]["rank_correlation"] == 1.0
    assert table["documents"]["rank_correlation"] == 0.0  # questions do not vary


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.write_text("old")

    def fail(part: Path) -> None:
        part.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.csv"]
