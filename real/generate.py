"""Text out of a checkpoint: prompts packed into blocks, run under a policy, cut at end of text.

What readers get wrong: a block always runs to ``max_new``. An end-of-text token shortens what is
printed, never what is computed, because no policy may know the true length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from policies.cost.model import CostModel
from policies.plan.memory import check_run
from policies.run_request import BYTES_OF_DTYPE, RunRequest
from policies.spec.model import ModelSpec
from policies.spec.model_hf import load_hf_config
from policies.spec.workload import Batch, Block
from policies.text_file import read_text
from policies.trace.span import Trace
from real.architecture import DTYPES, numerics_from_hf
from real.backend import Arenas, RealBackend, Setup
from real.checkpoint import Checkpoint, read_config
from real.run import Options, cap_gpu


@dataclass(frozen=True, slots=True)
class Generated:
    """New tokens of every prompt, in the order of the prompts, and the trace of the run."""

    tokens: tuple[tuple[int, ...], ...]
    trace: Trace


def model_of(folder: Path, dtype: str | None) -> tuple[ModelSpec, str]:
    """Model of a checkpoint in ``dtype`` (None: its own), and the dtype."""
    config = read_config(folder)
    own = str(config.get("torch_dtype", config.get("dtype")))
    wanted = dtype or own
    if wanted not in BYTES_OF_DTYPE:
        raise ValueError(f"dtype: {wanted!r} is none of {', '.join(BYTES_OF_DTYPE)}")
    width = BYTES_OF_DTYPE[wanted]
    model = load_hf_config(str(folder))
    return replace(model, weight_bytes_per_elem=width, kv_bytes_per_elem=width), wanted


def pack(
    lengths: Sequence[int], batch_size: int, n_batches: int, max_new: int
) -> tuple[Block, ...]:
    """Blocks for prompts of these lengths, in their order; each batch is padded to its longest."""
    for name, value in (("batch-size", batch_size), ("n-batches", n_batches), ("max-new", max_new)):
        if value < 1:
            raise ValueError(f"{name}: {value} must be >= 1")
    batches = [
        Batch(len(held), max(held))
        for held in (lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size))
    ]
    starts = range(0, len(batches), n_batches)
    return tuple(
        Block(i, tuple(batches[start : start + n_batches]), max_new)
        for i, start in enumerate(starts)
    )


def generate(
    request: RunRequest, folder: Path, prompts: Sequence[Sequence[int]], options: Options
) -> Generated:
    """Greedy continuation of prompts of token ids; ``request.blocks`` pack them in their order.

    ``OutOfMemory`` if the plan does not fit, ``ValueError`` for a checkpoint that is not the
    model's.
    """
    blocks = request.policy.blocks(request.blocks)
    placement = request.policy.place(request.model, request.machine, blocks)
    costs = CostModel(request.model, request.machine, placement)
    dtype = DTYPES[request.dtype]
    setup = Setup(
        model=request.model,
        placement=placement,
        blocks=blocks,
        dtype=dtype,
        device=options.device,
        source=Checkpoint(folder, request.model, dtype),
        prompts=prompts,
        numerics=numerics_from_hf(read_config(folder)),
        gpu_bytes=cap_gpu(request, options.device),
        disk_dir=options.disk_dir,
        poison=options.poison,
        delay_seed=options.delay_seed,
    )
    check_run(request.model, request.machine, placement, request.policy.buffers, blocks)
    arenas = Arenas.of(options.device)
    backend = RealBackend(setup, costs, arenas)
    try:
        trace = backend.run(request.plan(costs))
        return Generated(tuple(map(tuple, backend.tokens())), trace)
    finally:
        backend.close()
        arenas.close()


def read_prompts(path: Path) -> list[Mapping[str, object]]:
    """Lines of a prompts file, each ``{"prompt": text}`` or ``{"ids": [...]}``."""
    prompts = list(_parsed(path, read_text(path).splitlines()))
    if not prompts:
        raise ValueError(f"{path}: holds no prompt")
    return prompts


def _parsed(path: Path, lines: Sequence[str]) -> Iterator[Mapping[str, object]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: is not valid JSON ({error})") from error
        if not isinstance(record, dict) or ("prompt" in record) == ("ids" in record):
            raise ValueError(f"{path}:{number}: must be {{'prompt': text}} or {{'ids': [...]}}")
        ids, text = record.get("ids"), record.get("prompt")
        if "ids" in record and not (
            isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)
        ):
            raise ValueError(f"{path}:{number}: ids must be a non-empty list of integers >= 0")
        if "prompt" in record and not (isinstance(text, str) and text):
            raise ValueError(f"{path}:{number}: prompt must be a non-empty text")
        yield record


def end_tokens(folder: Path) -> frozenset[int]:
    """Token ids that end a text, from ``generation_config.json`` or ``config.json``."""
    config = dict(read_config(folder))
    path = folder / "generation_config.json"
    if path.is_file():
        config |= json.loads(path.read_text(encoding="utf-8"))
    ids = config.get("eos_token_id")
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def until_end(tokens: Sequence[int], ends: frozenset[int]) -> tuple[int, ...]:
    """Tokens before the first one that ends the text."""
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tuple(tokens[:stop])
