"""The same checkpoint in transformers and in the engine gives the same text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from policies.drive import Policy
from policies.flexgen import FlexGen
from policies.run_request import RunRequest
from policies.tightllm import TightLLM
from real.generate import generate, model_of, pack
from real.run import Options
from tests.lossless.engine import CPU
from tests.policies_table import SMALL, FixedRecompute

pytestmark = pytest.mark.filterwarnings("ignore")

MAX_NEW = 6
PROMPTS = ((5, 17, 80, 33, 9, 60, 2), (44,), (7, 7, 30), (91, 12, 55, 8), (3, 70))
_SHARED = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = {
    **_SHARED,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-6,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _configs():  # type: ignore[no-untyped-def]
    opt = transformers.OPTConfig(
        **_SHARED, ffn_dim=64, max_position_embeddings=64, word_embed_proj_dim=32, init_std=0.3,
        dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return {
        "opt": opt,
        "llama": transformers.LlamaConfig(**_LLAMA),
        "llama-biases-tied": transformers.LlamaConfig(
            **_LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
        ),
        "llama-3": transformers.LlamaConfig(**_LLAMA, rope_parameters=_LLAMA3),
        "llama-linear": transformers.LlamaConfig(
            **_LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
        ),
    }


@pytest.fixture(scope="module", params=["opt", "llama", "llama-biases-tied", "llama-3",
                                        "llama-linear"])  # fmt: skip
def checkpoint(request, tmp_path_factory):  # type: ignore[no-untyped-def]
    """A folder with a random checkpoint, and what transformers makes of the prompts."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(_configs()[request.param]).float().eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                tensor.add_(0.2 * torch.randn_like(tensor))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="20KB")
    texts = []
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = list(prompt)
            for _ in range(MAX_NEW):
                logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
                ids.append(int(logits.argmax()))
            texts.append(tuple(ids[len(prompt) :]))
    return folder, tuple(texts)


@pytest.mark.parametrize(
    "policy",
    [FlexGen(), TightLLM(solver="dp"), FixedRecompute((3,)), FlexGen(attention="cpu")],
    ids=["flexgen", "tightllm", "recompute", "cpu-attention"],
)
def test_tokens_are_those_of_transformers(checkpoint, policy: Policy, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder, expected = checkpoint
    model, dtype = model_of(folder, "float32")
    blocks = pack([len(p) for p in PROMPTS], 2, 2, MAX_NEW)
    request = RunRequest("text", model, SMALL, policy, blocks, dtype=dtype)
    options = Options(CPU, tmp_path, poison=True)
    assert generate(request, folder, PROMPTS, options).tokens == expected


def test_a_wrong_shape_is_refused(checkpoint, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder, _ = checkpoint
    config = json.loads((folder / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for path in folder.glob("*.safetensors"):
        (other / path.name).symlink_to(path)
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 99}))
    model, dtype = model_of(other, "float32")
    request = RunRequest("text", model, SMALL, FlexGen(), pack([2], 1, 1, 1), dtype=dtype)
    with pytest.raises(ValueError, match=r"has shape \[101, 32\], the model needs \[99, 32\]"):
        generate(request, other, [(1, 2)], Options(CPU, tmp_path))
