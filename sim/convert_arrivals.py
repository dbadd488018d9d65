"""Mooncake and Azure: request logs that hold counts, no text, and arrival times.

What readers get wrong: a Mooncake ``hash_id`` names a block of 512 tokens *and everything before
it*, so a block that was seen before is a hit of the whole prefix up to it. Azure says nothing of
reuse, so its trace has no cached prefixes at all, which is not the same as none hit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from sim.columns import MAX_VALUE, csv_rows, parse_count, require_columns
from sim.conversion import Conversion, field_of

_BLOCK_TOKENS = 512


# ---- Mooncake -----------------------------------------------------------------------------


def convert_mooncake(raw: Path) -> Conversion:
    """Requests of a Mooncake JSONL log with the hits of an infinite prefix cache.

    ``shared_blocks`` counts the leading blocks seen before; ``cached_prefix_tokens`` is
    ``min(512 * shared_blocks, input_length - 1)``; the parent is the latest earlier request that
    holds the last shared block. A request continues its parent's session if they share at least two
    blocks and all of the parent's blocks but its last. Skipped: requests with ``input_length`` 0.
    """
    names = (
        *("request_id", "arrival_ms", "conversation_id", "turn_index", "prompt_tokens"),
        *("response_tokens", "cached_prefix_tokens", "parent_request_id", "shared_blocks"),
    )
    result = Conversion({name: [] for name in names}, lists={"hash_ids": []})
    sessions = _Sessions()
    first_ms: int | None = None
    last_ms = 0
    for where, record in _json_lines(raw):
        arrival_ms = _count(record, "timestamp", where)
        input_tokens = _count(record, "input_length", where)
        response_tokens = _count(record, "output_length", where)
        blocks = _blocks(record, input_tokens, where)
        first_ms = arrival_ms if first_ms is None else first_ms
        if arrival_ms < last_ms:
            raise ValueError(f"{where}, key 'timestamp': {arrival_ms} is before {last_ms} ms")
        last_ms = arrival_ms
        if not input_tokens:
            result.skipped["requests with input_length 0"] += 1
            continue
        shared, parent, conversation, turn = sessions.place(blocks)
        cached = min(_BLOCK_TOKENS * shared, input_tokens - 1)
        result.add(
            request_id=len(result),
            arrival_ms=arrival_ms - first_ms,
            conversation_id=conversation,
            turn_index=turn,
            prompt_tokens=input_tokens - cached,
            response_tokens=response_tokens,
            cached_prefix_tokens=cached,
            parent_request_id=parent,
            shared_blocks=shared,
        )
        result.lists["hash_ids"].append(blocks)
    return result


class _Sessions:
    """Requests so far: who holds each block, and which session each request continues."""

    def __init__(self) -> None:
        self._holder: dict[int, int] = {}  # block -> latest request that holds it
        self._requests: list[tuple[list[int], int, int]] = []  # blocks, conversation, turn
        self._n_conversations = 0

    def place(self, blocks: list[int]) -> tuple[int, int, int, int]:
        """Shared blocks, parent (-1: none), conversation and turn of the next request."""
        shared = next((i for i, b in enumerate(blocks) if b not in self._holder), len(blocks))
        parent = self._holder[blocks[shared - 1]] if shared else -1
        conversation, turn = self._n_conversations, 0
        if shared >= 2:
            of_parent, parent_conversation, parent_turn = self._requests[parent]
            whole = len(of_parent) - 1  # the last block is partial, or ends the prompt
            if whole <= shared and of_parent[:whole] == blocks[:whole]:
                conversation, turn = parent_conversation, parent_turn + 1
        if conversation == self._n_conversations:
            self._n_conversations += 1
        for block in blocks:
            self._holder[block] = len(self._requests)
        self._requests.append((blocks, conversation, turn))
        return shared, parent, conversation, turn


def _json_lines(path: Path) -> Iterator[tuple[str, object]]:
    """Place and value of each line; ``ValueError`` with line and byte offset where one is bad."""
    if not path.is_file():
        raise ValueError(f"{path}: {'is not a file' if path.exists() else 'does not exist'}")
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number} (byte {offset})"
            offset += len(line)
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                cut = "" if line.endswith(b"\n") else ", the file is cut off"
                raise ValueError(f"{where}: is not JSON{cut} ({error})") from error
            yield where, record


def _count(record: object, key: str, where: str) -> int:
    value = cast("int", field_of(record, key, int, where))
    if not 0 <= value <= MAX_VALUE:
        raise ValueError(f"{where}, key {key!r}: {value} must be in 0..{MAX_VALUE}")
    return value


def _blocks(record: object, input_tokens: int, where: str) -> list[int]:
    """``hash_ids``: one integer per started block of 512 tokens."""
    blocks = cast("list[object]", field_of(record, "hash_ids", list, where))
    need = -(-input_tokens // _BLOCK_TOKENS)
    if len(blocks) != need:
        raise ValueError(
            f"{where}, key 'hash_ids': has {len(blocks)} blocks, input_length {input_tokens} needs "
            f"{need}"
        )
    for block in blocks:
        if type(block) is not int or not 0 <= block <= MAX_VALUE:
            raise ValueError(f"{where}, key 'hash_ids': {block!r} must be in 0..{MAX_VALUE}")
    return cast("list[int]", blocks)


# ---- Azure --------------------------------------------------------------------------------


def convert_azure(raw: Path) -> Conversion:
    """Requests of an Azure LLM inference log: ``TIMESTAMP, ContextTokens, GeneratedTokens``.

    Arrivals are rounded to milliseconds after the first. Times without a zone are UTC. Skipped:
    requests without context tokens.
    """
    if not raw.is_file():
        raise ValueError(f"{raw}: {'is not a file' if raw.exists() else 'does not exist'}")
    names = ("request_id", "arrival_ms", "prompt_tokens", "response_tokens")
    result = Conversion({name: [] for name in names})
    first: datetime | None = None
    last: datetime | None = None
    for line, row in csv_rows(raw):
        require_columns(raw, list(row), ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        where = f"{raw}, line {line}, column"
        time = _time(row["TIMESTAMP"], f"{where} TIMESTAMP")
        prompt = parse_count(row["ContextTokens"], f"{where} ContextTokens")
        response = parse_count(row["GeneratedTokens"], f"{where} GeneratedTokens")
        first, last = first or time, last or time
        if time < last:
            raise ValueError(f"{where} TIMESTAMP: {time} is before {last}, the line before it")
        last = time
        if not prompt:
            result.skipped["requests with 0 ContextTokens"] += 1
            continue
        result.add(
            request_id=len(result),
            arrival_ms=round((time - first).total_seconds() * 1e3),
            prompt_tokens=prompt,
            response_tokens=response,
        )
    return result


def _time(text: str, where: str) -> datetime:
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise ValueError(f"{where}: {text!r} must be a time like 2023-11-16 18:15:46.68") from error
    return time if time.tzinfo else time.replace(tzinfo=UTC)
