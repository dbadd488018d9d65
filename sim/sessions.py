"""Serving workloads: turns of conversations, questions on documents, single requests.

A turn brings ``n_prompt`` new tokens (message and BOS) after ``n_history`` earlier ones; ``prefix``
names the blocks in which the history, and later the turn itself, would be stored. What readers get
wrong: the response length is here, in the simulator's data, and nowhere that a policy can see.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sim.columns import NULL, read_columns
from sim.lengths import LengthTrace
from sim.workloads import GENERATED, SHIPPED, generate

SEEDFIT_RESPONSE = 2.2
"""Earlier responses counted so many times bring ShareGPT's K to that of the kappa paper."""
HASH_BLOCK_TOKENS = 512  # tokens behind one Mooncake hash id
HISTORIES = ("trace", "seedfit")

Column = NDArray[np.int64]


@dataclass(slots=True)
class Turn:
    """One request with its true lengths.

    ``key`` names the chain that holds the history (a conversation or a document; None: nothing is
    reused), ``hashes`` its blocks where the trace has them. ``next_turn`` arrives after this one
    has ended. ``reusable`` tokens of history and prompt can be reused by others later.
    """

    index: int
    n_history: int
    n_prompt: int
    n_response: int
    arrival_s: float = 0.0
    key: Hashable | None = None
    hashes: tuple[int, ...] = ()
    is_document: bool = False
    group: int = 0
    next_turn: Turn | None = None

    def blocks(self, n_tokens: int, block_tokens: int) -> tuple[tuple[Hashable, int], ...]:
        """Segments of the whole blocks in the first ``n_tokens`` of this turn's context."""
        n_blocks = n_tokens // block_tokens
        if self.hashes:
            return tuple((h, 1) for h in self.hashes[:n_blocks])
        return ((self.key, n_blocks),) if self.key is not None and n_blocks else ()


@dataclass(frozen=True, slots=True)
class Sessions:
    """Turns in file order, and how they hang together.

    ``heads`` are the first turns of conversations, or all turns where each stands alone.
    ``arrival_s`` of a turn is that of the trace, where it has one (``timed``).
    """

    source: str
    turns: tuple[Turn, ...]
    heads: tuple[Turn, ...]
    timed: bool
    block_tokens: int | None  # None: free to choose
    n_cut: int = 0
    n_unknown_prefix: int = 0

    @property
    def turns_per_head(self) -> float:
        """Mean turns of a conversation."""
        return len(self.turns) / len(self.heads)


def load_sessions(
    source: str,
    *,
    path: str | None = None,
    limit: int | None = None,
    max_new: int | None = None,
    history: str = "trace",
    n_groups: int = 1,
    seed: int = 0,
) -> Sessions:
    """Turns of a named workload or of the trace at ``path``; the first ``limit`` of them.

    ``history`` ``seedfit`` counts earlier responses 2.2 times (and makes them so long), the
    calibration that reproduces the kappa paper's K; documents have its K already. Responses are
    cut at ``max_new`` (None: not). Conversations, documents and single requests are dealt to
    ``n_groups`` groups in turn.
    """
    if history not in HISTORIES:
        raise ValueError(f"serve.history: {history!r} is none of {', '.join(HISTORIES)}")
    for name, value in (("limit", limit), ("max_new", max_new)):
        if value is not None and value < 1:
            raise ValueError(f"serve.{name}: {value} must be >= 1 or null")
    if n_groups < 1:
        raise ValueError(f"serve.n_groups: {n_groups} must be >= 1")
    table = _read(source, path, seed)
    turns = _turns(table, history, n_groups)
    if limit is not None:
        turns = turns[:limit]
    n_cut = 0
    if max_new is not None:
        for turn in turns:
            if turn.n_response > max_new:
                turn.n_response = max_new
                n_cut += 1
    heads = _chain(turns, table)
    hashed = any(turn.hashes for turn in turns)
    return Sessions(
        table.source,
        tuple(turns),
        tuple(heads),
        table.arrival_ms is not None,
        HASH_BLOCK_TOKENS if hashed else None,
        n_cut,
        table.n_unknown_prefix,
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """Columns of a trace; None where it has none."""

    source: str
    prompt: Column
    response: Column
    history: Column
    history_seedfit: Column | None = None
    conversation: Column | None = None
    document: Column | None = None
    arrival_ms: Column | None = None
    hashes: list[tuple[int, ...]] | None = None
    n_unknown_prefix: int = 0


_OPTIONAL = (
    "cached_prefix_tokens",
    "cached_prefix_tokens_seedfit",
    "conversation_id",
    "document_id",
    "arrival_ms",
)


def _read(source: str, path: str | None, seed: int) -> _Table:
    if path is None:
        if source in SHIPPED:
            with as_file(files("sim") / "data" / f"{source}_turns_sample.csv") as file:
                return _read_file(file, source)
        if source in GENERATED:
            return _drawn(generate(source, None, seed))
        raise ValueError(
            f"workload.source: {source!r} cannot be served; give workload.path or one of "
            f"{', '.join((*SHIPPED, *GENERATED))}"
        )
    return _read_file(Path(path), path)


def _read_file(path: Path, source: str) -> _Table:
    columns = read_columns(path, ("prompt_tokens", "response_tokens"), _OPTIONAL)
    n = len(columns["prompt_tokens"])
    history = columns.get("cached_prefix_tokens", np.full(n, NULL))
    return _Table(
        source=source,
        prompt=columns["prompt_tokens"],
        response=columns["response_tokens"],
        history=np.where(history == NULL, 0, history),
        history_seedfit=columns.get("cached_prefix_tokens_seedfit"),
        conversation=columns.get("conversation_id"),
        document=columns.get("document_id"),
        arrival_ms=columns.get("arrival_ms"),
        hashes=_hashes(path),
        n_unknown_prefix=int(np.count_nonzero(history == NULL)),
    )


def _hashes(path: Path) -> list[tuple[int, ...]] | None:
    """The column ``hash_ids`` of a Parquet trace that has one."""
    if path.suffix.lower() != ".parquet" or "hash_ids" not in pq.read_schema(path).names:
        return None
    column = pq.read_table(path, columns=["hash_ids"]).column("hash_ids")
    if not pa.types.is_list(column.type):
        raise ValueError(f"{path}, column hash_ids: has type {column.type}, must be lists")
    return [tuple(ids or ()) for ids in column.to_pylist()]


def _drawn(trace: LengthTrace) -> _Table:
    """A generated trace: successive questions with equal prefix are on one document."""
    prefix = trace.cached_prefix_tokens
    document = None
    if prefix.any():
        document = np.concatenate(([0], np.cumsum(np.diff(prefix) != 0))).astype(np.int64)
    return _Table(
        trace.source, trace.prompt_tokens, trace.response_tokens, prefix, document=document
    )


def _turns(table: _Table, history: str, n_groups: int) -> list[Turn]:
    n = len(table.prompt)
    past, response = table.history, np.maximum(table.response, 1)
    if history == "seedfit" and table.document is None:
        if table.conversation is None:
            raise ValueError(
                f"serve.history: 'seedfit' needs the turns of conversations (documents stay as "
                f"they are), {table.source} has no column conversation_id"
            )
        if table.history_seedfit is None:
            earlier = _earlier(table.conversation, table.response)
            past = past + np.rint((SEEDFIT_RESPONSE - 1.0) * earlier).astype(np.int64)
        else:
            past = table.history_seedfit
        response = np.rint(SEEDFIT_RESPONSE * response).astype(np.int64)
    chain = table.conversation if table.conversation is not None else table.document
    kind = "c" if table.conversation is not None else "d"
    groups = (chain if chain is not None else np.arange(n)) % n_groups
    hashes = table.hashes
    arrival = table.arrival_ms.tolist() if table.arrival_ms is not None else [0] * n
    rows = zip(past.tolist(), table.prompt.tolist(), response.tolist(), arrival, groups.tolist(),
               chain.tolist() if chain is not None else [None] * n, strict=True)  # fmt: skip
    return [
        Turn(
            index=i,
            n_history=k,
            n_prompt=prompt + 1,  # BOS
            n_response=answer,
            arrival_s=ms / 1e3,
            key=None if name is None else (kind, name),
            hashes=hashes[i] if hashes is not None else (),
            is_document=kind == "d" and name is not None,
            group=group,
        )
        for i, (k, prompt, answer, ms, group, name) in enumerate(rows)
    ]


def _earlier(conversation: Column, response: Column) -> Column:
    """Response tokens of the earlier turns of the same conversation, by turn."""
    so_far: dict[int, int] = {}
    earlier = np.zeros(len(response), dtype=np.int64)
    for i, (name, tokens) in enumerate(zip(conversation.tolist(), response.tolist(), strict=True)):
        earlier[i] = so_far.get(name, 0)
        so_far[name] = int(earlier[i]) + tokens
    return earlier


def _chain(turns: list[Turn], table: _Table) -> list[Turn]:
    """Link the turns of each conversation; returns the first of each."""
    if table.conversation is None:
        return list(turns)
    heads, last = [], dict[Hashable, Turn]()
    for turn in turns:
        before = last.get(turn.key)
        if before is None:
            heads.append(turn)
        else:
            before.next_turn = turn
        last[turn.key] = turn
    return heads
