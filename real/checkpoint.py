"""Checkpoints: tensors read from safetensors files in chunks, straight to where they will live.

A safetensors file is an 8-byte length, a JSON header of dtypes, shapes and byte ranges, and raw
little-endian data. Reading it in chunks of a bounded size means that no tensor is ever twice in
memory. What readers get wrong: page faults of a memory map would charge the page cache to the run
and read slowly, so this reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from policies.spec.model import ModelSpec
from policies.text_file import read_text
from real.layout import Shape

CHUNK_BYTES = 32 * 2**20

_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}

_LLAMA = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "layer": "model.layers.{}",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "mlp_norm": "post_attention_layernorm",
}
_OPT = {
    "embed": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "final_norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
    "layer": "model.decoder.layers.{}",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "up": "fc1",
    "down": "fc2",
    "mlp_norm": "final_layer_norm",
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: Shape
    start: int
    stop: int


class Checkpoint:
    """The tensors of a folder of safetensors files, named as the engine names them.

    ``ValueError`` for files that are missing or malformed, and for a tensor that is absent or has
    another shape than the model.
    """

    def __init__(self, folder: Path, model: ModelSpec, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._names = _OPT if model.learned_positions else _LLAMA
        self._folder = folder
        self._entries: dict[str, _Entry] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{folder}: holds no .safetensors file")
        for path in files:
            self._entries |= _header(path)

    def chunks(self, name: str, layer: int | None, shape: Shape) -> Iterator[Tensor]:
        """A tensor's elements in order, flat, at most ``CHUNK_BYTES`` of the file at a time."""
        entry = self._find(self._name(name, layer))
        if entry.shape != shape:
            raise ValueError(
                f"{entry.path}: {self._name(name, layer)} has shape {list(entry.shape)}, the model "
                f"needs {list(shape)}"
            )
        with entry.path.open("rb") as file:
            file.seek(entry.start)
            left = entry.stop - entry.start
            while left:
                data = bytearray(min(left, CHUNK_BYTES))
                if file.readinto(data) != len(data):
                    raise ValueError(f"{entry.path}: ends inside tensor {name}")
                left -= len(data)
                yield torch.frombuffer(data, dtype=entry.dtype).to(self._dtype)

    def _name(self, name: str, layer: int | None) -> str:
        module, kind = name.split(".")
        inside = self._names[module]
        prefix = "" if layer is None else self._names["layer"].format(layer) + "."
        return f"{prefix}{inside}.{kind}"

    def _find(self, name: str) -> _Entry:
        # Base models are saved without the name of the part that holds the decoder.
        for candidate in (name, name.removeprefix("model.")):
            if candidate in self._entries:
                return self._entries[candidate]
        raise ValueError(f"{self._folder}: no file holds the tensor {name}")


class Random:
    """Random weights: matrices and biases N(0, 0.02), norms 1 and 0.

    Every tensor has its own generator, seeded by its name, so that a model is the same whatever
    its placement. Drawn on ``device``; devices draw different numbers from one seed.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed, self._dtype, self._device = seed, dtype, device

    def chunks(self, name: str, layer: int | None, shape: Shape) -> Iterator[Tensor]:
        """A tensor's elements in order, flat, on the device that drew them."""
        generator = torch.Generator(self._device)
        generator.manual_seed(_seed_of(self._seed, name, layer))
        left = torch.Size(shape).numel()
        most = CHUNK_BYTES // self._dtype.itemsize
        while left:
            chunk = torch.empty(min(left, most), dtype=self._dtype, device=self._device)
            left -= chunk.numel()
            if "norm" in name:
                chunk.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                chunk.normal_(0.0, 0.02, generator=generator)
            yield chunk


def _seed_of(seed: int, name: str, layer: int | None) -> int:
    """63 bits that differ between tensors; FNV-1a, because Python's own hash is salted."""
    value = 0xCBF29CE484222325
    for byte in f"{seed}/{layer}/{name}".encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value >> 1


def _header(path: Path) -> dict[str, _Entry]:
    """Tensors of one file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path}: is not a safetensors file (header of {length} bytes)")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path}: has a malformed safetensors header ({error})") from error
    entries = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES.get(fields["dtype"])
        if dtype is None:
            raise ValueError(
                f"{path}: {name} has dtype {fields['dtype']}, supported are {', '.join(_DTYPES)}"
            )
        start, stop = (8 + length + offset for offset in fields["data_offsets"])
        if stop > size:
            raise ValueError(f"{path}: is truncated, {name} ends at byte {stop} of {size}")
        entries[name] = _Entry(path, dtype, tuple(fields["shape"]), start, stop)
    return entries


def read_config(folder: Path) -> Mapping[str, object]:
    """The parsed ``config.json`` of a checkpoint folder."""
    text = read_text(folder / "config.json")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{folder}/config.json: is not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder}/config.json: must hold one JSON object")
    return config


Chunks = Callable[[str, int | None, Shape], Iterator[Tensor]]
