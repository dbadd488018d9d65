"""Files of a run: written whole or not at all, the trace in the simulator's schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from policies.run_request import RunRequest
from policies.trace.decisions import write_decisions
from policies.trace.jsonl import write_jsonl
from real.run import RunResult


def write_result(folder: Path, request: RunRequest, result: RunResult) -> None:
    """``request.json``, ``result.json`` and, where the run took place, decisions, trace, tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "request.json", lambda path: _text(path, request.to_json()))
    if result.trace is not None:
        spans = result.trace.spans
        _replace(folder / "decisions.csv", lambda path: write_decisions(result.decisions, path))
        _replace(folder / "trace.jsonl", lambda path: write_jsonl(spans, path))
        if len({len(row) for row in result.tokens}) == 1:  # blocks may differ in length
            _replace(folder / "tokens.npy", lambda path: _array(path, result))
    # Last: a folder that has a result has everything.
    _replace(folder / "result.json", lambda path: _json(path, result.record))


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    part = path.with_name(path.name + ".part")
    write(part)
    part.replace(path)


def _text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _json(path: Path, record: Mapping[str, object]) -> None:
    _text(path, json.dumps(record, indent=1, allow_nan=False) + "\n")


def _array(path: Path, result: RunResult) -> None:
    with path.open("wb") as file:
        np.save(file, np.array(result.tokens, dtype=np.int64))
