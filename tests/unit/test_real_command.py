"""The command line in process: files written, text out, errors in one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from policies.run_request import RunRequest
from policies.spec.hardware_file import find_profile
from policies.trace.jsonl import read_jsonl
from real.__main__ import main, parse_bytes
from tests.lossless.engine import FAMILIES, UNIFORM, in_dtype
from tests.policies_table import POLICIES, SMALL

MODEL = in_dtype(FAMILIES["opt"], "float32")
REQUEST = RunRequest("cell", MODEL, SMALL, POLICIES["flexgen-pinned"], UNIFORM.blocks,
                     dtype="float32")  # fmt: skip


def write(folder: Path, *requests: RunRequest) -> Path:
    folder.mkdir()
    for request in requests:
        (folder / f"{request.name}.json").write_text(request.to_json())
    return folder


def cli(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def test_run_writes_a_folder_a_request(tmp_path: Path) -> None:
    other = replace(REQUEST, name="other", policy=POLICIES["tightllm-dp"], steps_run=99)
    small = replace(REQUEST, name="small", hardware=replace(SMALL, gpu_bytes=1e4))
    requests = write(tmp_path / "requests", REQUEST, other, small)
    out = tmp_path / "out"
    assert cli("run", requests, "--out", out, "--device", "cpu", "--disk-dir", tmp_path) == 0
    records = {p.parent.name: json.loads(p.read_text()) for p in out.glob("*/result.json")}
    assert {name: r["status"] for name, r in records.items()} == {
        "cell": "ok", "other": "ok", "small": "oom",
    }  # fmt: skip
    assert records["small"]["oom_tier"] == "gpu"
    assert not (out / "small" / "trace.jsonl").exists()
    assert records["cell"]["tokens_sha256"] == records["other"]["tokens_sha256"]
    assert (
        records["cell"]["steps_run"]
        == records["other"]["steps_run"]
        == UNIFORM.blocks[0].max_new - 1
    )
    cell = records["cell"]
    trace = read_jsonl(out / "cell" / "trace.jsonl")
    assert cell["makespan_s"] == trace.makespan_s
    steps = cell["step_s"][0]
    assert len(steps) == UNIFORM.blocks[0].max_new - 1
    assert cell["prefill_s"] + sum(steps) <= cell["makespan_s"]
    assert cell["decode_tokens_per_s"] == pytest.approx(5 * len(steps) / sum(steps))
    assert cell["bound_ratio"] >= 1.0
    assert cell["decode_bound_ratio"] >= 1.0
    assert sum(v for k, v in cell.items() if k.startswith("wait_")) == pytest.approx(1.0)
    assert sorted(p.name for p in (out / "cell").iterdir()) == [
        "decisions.csv", "request.json", "result.json", "tokens.npy", "trace.jsonl",
    ]  # fmt: skip


def test_repeats_have_their_own_folders(tmp_path: Path) -> None:
    requests = write(tmp_path / "requests", REQUEST)
    code = cli("run", requests, "--out", tmp_path / "out", "--device", "cpu", "--repeat", 2,
               "--gpu-mem-cap", "1GiB", "--poison", "--delays", 3)  # fmt: skip
    assert code == 0
    folders = sorted(p.parent.name for p in (tmp_path / "out").glob("cell/*/result.json"))
    assert folders == ["r0", "r1"]
    stored = json.loads((tmp_path / "out" / "cell" / "r0" / "request.json").read_text())
    assert stored["gpu_mem_cap_bytes"] == 2**30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / "requests" / "cell.json").write_text("{"), "cell.json: request: is not"),
        (lambda p: (p / "requests" / "cell.json").unlink(), "holds no .json request"),
        (
            lambda p: (p / "requests" / "again.json").write_text(REQUEST.to_json()),
            "two of them are named 'cell'",
        ),
    ],
)
def test_bad_requests_are_one_line(change, message, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    requests = write(tmp_path / "requests", REQUEST)
    change(tmp_path)
    assert cli("run", requests, "--out", tmp_path / "out", "--device", "cpu") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("error: ")
    assert message.replace(" ", "") in said.replace(" ", "")


def test_a_disk_folder_must_exist(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    requests = write(tmp_path / "requests", REQUEST)
    arguments = ("run", requests, "--out", tmp_path, "--device", "cpu", "--disk-dir")
    assert cli(*arguments, tmp_path / "none") == 2
    assert "is not a folder" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "nbytes"), [("7", 7), ("40GiB", 40 * 2**30), ("1.5 GB", 15 * 10**8), ("2MiB", 2**21)]
)
def test_bytes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "40gib"])
def test_bytes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number of bytes"):
        parse_bytes(text)


# ---- generate -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer of whole words."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("llama")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24,
        "num_hidden_layers": 2, "vocab_size": 12, "max_position_embeddings": 64,
        "torch_dtype": "float32", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    shapes = {"model.embed_tokens": (12, 16), "model.norm": (16,), "lm_head": (12, 16)}
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj": (16, 16), f"{layer}.self_attn.k_proj": (8, 16),
            f"{layer}.self_attn.v_proj": (8, 16), f"{layer}.self_attn.o_proj": (16, 16),
            f"{layer}.mlp.gate_proj": (24, 16), f"{layer}.mlp.up_proj": (24, 16),
            f"{layer}.mlp.down_proj": (16, 24), f"{layer}.input_layernorm": (16,),
            f"{layer}.post_attention_layernorm": (16,),
        }  # fmt: skip
    save_file(
        {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    words = {f"w{i}": i for i in range(12)}
    tokenizer = Tokenizer(models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def generated(folder: Path, tmp_path: Path, *more: object) -> list[dict[str, object]]:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "w1 w2 w3"}, {"ids": [4]}, {"prompt": "w5 w6", "id": "x"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "answers.jsonl"
    code = cli("generate", "--model", folder, "--prompts", prompts, "--out", out, "--device",
               "cpu", "--max-new", 6, "--batch-size", 2, "--disk-dir", tmp_path, *more)  # fmt: skip
    assert code == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_generate_is_the_same_under_every_policy(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = generated(checkpoint, tmp_path)
    assert [a["answer"] for a in answers] == [
        " ".join(f"w{i}" for i in a["answer_ids"])  # type: ignore[attr-defined]
        for a in answers
    ]
    assert answers[2]["id"] == "x"
    assert all(len(a["answer_ids"]) == 6 and not a["ended"] for a in answers)  # type: ignore[arg-type]
    own = tmp_path / "conf" / "hardware"
    own.mkdir(parents=True)
    shutil.copy(find_profile("t4"), own / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    assert generated(checkpoint, tmp_path, "--hardware", "mine") == answers
    for policy in ("accelerate-big", "flexgen"):
        assert generated(checkpoint, tmp_path, "--policy", policy) == answers


def test_an_end_token_cuts_the_text(checkpoint: Path, tmp_path: Path) -> None:
    whole = generated(checkpoint, tmp_path)
    end = whole[0]["answer_ids"][2]  # type: ignore[index]
    config = checkpoint / "generation_config.json"
    config.write_text(json.dumps({"eos_token_id": [end]}))
    try:
        cut = generated(checkpoint, tmp_path)
    finally:
        config.unlink()
    first = whole[0]["answer_ids"].index(end)  # type: ignore[attr-defined]
    assert cut[0]["answer_ids"] == whole[0]["answer_ids"][:first]  # type: ignore[index]
    assert cut[0]["ended"]


@pytest.mark.parametrize(
    ("line", "more", "message"),
    [
        ("{", (), "prompts.jsonl:1: is not valid JSON"),
        ('{"text": "a"}', (), "prompts.jsonl:1: must be"),
        ('{"ids": []}', (), "ids must be a non-empty list"),
        ('{"prompt": ""}', (), "prompt must be a non-empty text"),
        ("", (), "holds no prompt"),
        ('{"ids": [99]}', (), "token ids must be in 0..11, one has 99..99"),
        ('{"ids": [1]}', ("--policy", "best"), "policy: 'best' is none of accelerate"),
        (
            '{"ids": [1]}',
            ("--hardware", "abacus"),
            "profile: 'abacus' is no YAML file and none of a100, ",
        ),
        ('{"ids": [1]}', ("--hardware", "no.yaml"), "error: no.yaml: No such file or directory"),
        ('{"ids": [1]}', ("--max-new", "0"), "max-new: 0 must be >= 1"),
        ('{"ids": [1]}', ("--threads", "0"), "threads: 0 must be >= 1"),
        ('{"ids": [1]}', ("--max-new", "99"), "exceeds model.max_positions 64"),
        ('{"ids": [1]}', ("--dtype", "int4"), "dtype: 'int4' is none of"),
        ('{"ids": [1]}', ("--model", "nowhere"), "nowhere/config.json: cannot be read"),
    ],
)
def test_generate_errors(line, more, message, checkpoint, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(line + "\n")
    code = cli("generate", "--model", checkpoint, "--prompts", prompts, "--out",
               tmp_path / "answers.jsonl", "--device", "cpu", *more)  # fmt: skip
    assert code == 2
    assert message.replace(" ", "") in capsys.readouterr().err.replace("\n", "").replace(" ", "")
