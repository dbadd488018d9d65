"""ShareGPT: a JSON array of ``{id, conversations: [{from, value}, ...]}`` into turns.

A turn is a run of user (or system) messages and the run of assistant messages after it; its cached
prefix is everything before it. What readers get wrong: the V3 file cuts long conversations into
entries of at most 2,048 tokens. Each *entry* is one conversation here, so the prefixes of a V3 file
are shorter than those of the conversations that it was cut from.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import cast

from sim.conversion import Conversion, CountTokens, field_of
from sim.json_list import json_list

_USER = ("human", "user", "system")
_ASSISTANT = ("gpt", "chatgpt", "bing", "bard", "assistant")


def convert_sharegpt(raw: Path, count: CountTokens) -> Conversion:
    """Turns of every conversation, numbered in file order.

    Skipped: conversations without a user message, with a sender that is neither user nor assistant
    or with text that is not Unicode; assistant messages before the first user message. Raises
    ``ValueError`` for a record without ``conversations``, a message without ``from`` or ``value``.
    """
    result = Conversion(
        {
            "conversation_id": [],
            "turn_index": [],
            "prompt_tokens": [],
            "response_tokens": [],
            "cached_prefix_tokens": [],
        }
    )
    n_conversations = 0
    for where, record in json_list(raw):
        messages = cast("list[object]", field_of(record, "conversations", list, where))
        senders = [_sender(message, where) for message in messages]
        if any(from_user is None for from_user, _ in senders):
            result.skipped["conversations with an unknown sender"] += 1
            continue
        try:
            turns, n_opening = _turns([(bool(u), text) for u, text in senders], count)
        except UnicodeEncodeError:
            result.skipped["conversations with text that is not Unicode"] += 1
            continue
        if n_opening:
            result.skipped["assistant messages that open a conversation"] += n_opening
        if not turns:
            result.skipped["conversations without a user message"] += 1
            continue
        _add(result, n_conversations, turns)
        n_conversations += 1
    return result


def _sender(message: object, where: str) -> tuple[bool | None, str]:
    """Whether a message is the user's (None: unknown sender), and its text."""
    sender = field_of(message, "from", str, f"{where}, conversations")
    text = cast("str", field_of(message, "value", str, f"{where}, conversations"))
    return (True if sender in _USER else False if sender in _ASSISTANT else None), text


def _turns(
    messages: list[tuple[bool, str]], count: CountTokens
) -> tuple[list[tuple[int, int]], int]:
    """(prompt, response) tokens of each turn, and assistant messages before the first."""
    runs = [
        (from_user, [text for _, text in run])
        for from_user, run in groupby(messages, key=lambda message: message[0])
    ]
    n_opening = len(runs.pop(0)[1]) if runs and not runs[0][0] else 0
    tokens = [sum(map(count, texts)) for _, texts in runs]
    if len(tokens) % 2:
        tokens.append(0)  # the last user message has no response
    return list(zip(tokens[::2], tokens[1::2], strict=True)), n_opening


def _add(result: Conversion, conversation_id: int, turns: list[tuple[int, int]]) -> None:
    prefix = 0
    for index, (prompt, response) in enumerate(turns):
        result.add(
            conversation_id=conversation_id,
            turn_index=index,
            prompt_tokens=prompt,
            response_tokens=response,
            cached_prefix_tokens=prefix,
        )
        prefix += prompt + response
        if not response:
            result.notes["turns without a response (a reader generates 1 token)"] += 1
