"""NarrativeQA, FinQA and DocFinQA: questions, each with its document as cached prefix.

A prefix is the document in tokens, a prompt the question, a response the reference answer (FinQA:
the gold program). What readers get wrong: NarrativeQA publishes its stories as links. A story that
was not downloaded is *estimated* from its published size, and counted in the notes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import cast

from sim.columns import csv_rows, parse_count, require_columns
from sim.conversion import Conversion, CountTokens, field_of
from sim.json_list import json_list

# Llama-3 tokens: books measured on three Gutenberg files; scripts (HTML with much white space)
# fitted to the published median document of 57K tokens (arXiv 2601.19910).
_BYTES_PER_TOKEN = {"gutenberg": 4.2506, "movie": 4.4325}


def _empty() -> Conversion:
    return Conversion(
        {
            "document_id": [],
            "question_index": [],
            "prompt_tokens": [],
            "response_tokens": [],
            "cached_prefix_tokens": [],
        }
    )


class _Questions:
    """Rows grouped by document, numbered in order of first appearance."""

    def __init__(self, result: Conversion) -> None:
        self.result = result
        self._documents: dict[str, tuple[int, int]] = {}  # key -> (document_id, questions so far)

    def add(self, document: str, tokens: int, prompt: int, response: int) -> None:
        number, index = self._documents.get(document, (len(self._documents), 0))
        self._documents[document] = (number, index + 1)
        self.result.add(
            document_id=number,
            question_index=index,
            prompt_tokens=prompt,
            response_tokens=response,
            cached_prefix_tokens=tokens,
        )

    def __contains__(self, document: str) -> bool:
        return document in self._documents


# ---- NarrativeQA --------------------------------------------------------------------------


def convert_narrativeqa(raw: Path, count: CountTokens) -> Conversion:
    """Questions of a NarrativeQA folder: ``documents.csv``, ``qaps.csv`` and any stories.

    A story is ``tmp/<document_id>.content`` (where the published download script puts it), counted
    whole, mark-up included; a missing one is ``story_file_size`` / 4.2506 (books) or 4.4325 (film
    scripts) tokens. The response is ``answer1``. Skipped: questions without text, questions whose
    document is not listed, documents without questions.
    """
    if not raw.is_dir():
        raise ValueError(f"{raw}: must be a folder with documents.csv and qaps.csv")
    result = _empty()
    sizes = _documents(raw)
    questions = _Questions(result)
    tokens: dict[str, int] = {}
    path = _file_in(raw, "qaps.csv")
    for line, row in csv_rows(path):
        require_columns(path, list(row), ("document_id", "question", "answer1"))
        document, question = row["document_id"], row["question"].strip()
        if not question:
            result.skipped["questions without text"] += 1
        elif document not in sizes:
            result.skipped["questions whose document is not in documents.csv"] += 1
        else:
            if document not in tokens:
                tokens[document] = _story_tokens(raw, document, sizes[document], count, result)
            if tokens[document] < 1:
                raise ValueError(f"{path}, line {line}: document {document} is empty")
            answer = count(row["answer1"].strip())
            questions.add(document, tokens[document], count(question), answer)
    unasked = sum(document not in questions for document in sizes)
    if unasked:
        result.skipped["documents without questions"] += unasked
    return result


def _file_in(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{path}: does not exist")
    return path


def _documents(raw: Path) -> dict[str, int]:
    """Estimated tokens of each document, from its kind and published file size."""
    path = _file_in(raw, "documents.csv")
    sizes: dict[str, int] = {}
    for line, row in csv_rows(path):
        require_columns(path, list(row), ("document_id", "kind", "story_file_size"))
        where = f"{path}, line {line}, column"
        if row["kind"] not in _BYTES_PER_TOKEN:
            raise ValueError(
                f"{where} kind: {row['kind']!r} must be one of {', '.join(_BYTES_PER_TOKEN)}"
            )
        if row["document_id"] in sizes:
            raise ValueError(f"{where} document_id: {row['document_id']!r} is repeated")
        size_bytes = parse_count(row["story_file_size"], f"{where} story_file_size")
        sizes[row["document_id"]] = round(size_bytes / _BYTES_PER_TOKEN[row["kind"]])
    return sizes


def _story_tokens(
    raw: Path, document: str, estimate: int, count: CountTokens, result: Conversion
) -> int:
    story = raw / "tmp" / f"{document}.content"
    if not document.isalnum() or not story.is_file():  # an id is part of a path: letters, digits
        result.notes["documents estimated from story_file_size (no story file)"] += 1
        return estimate
    text = story.read_bytes().decode("utf-8", errors="replace")
    if "\ufffd" in text:
        result.notes["stories with bytes that are not UTF-8 (counted as U+FFFD)"] += 1
    return count(text)


# ---- FinQA and DocFinQA -------------------------------------------------------------------


def convert_finqa(raw: Path, count: CountTokens) -> Conversion:
    """Questions of a FinQA or DocFinQA JSON array.

    FinQA's document is one page: ``pre_text``, ``table`` (cells joined by " | ", a row a line) and
    ``post_text``. DocFinQA's is ``Context``, the whole filing. Questions on the same text share a
    document. Skipped: records with an empty document or question, or text that is not Unicode.
    """
    result = _empty()
    questions = _Questions(result)
    tokens: dict[str, int] = {}
    for where, record in json_list(raw):
        document, question, program = _texts(record, where)
        if not document.strip():
            result.skipped["records with an empty document"] += 1
            continue
        if not question.strip():
            result.skipped["records with an empty question"] += 1
            continue
        try:
            key = hashlib.sha256(document.encode()).hexdigest()
            lengths = count(question.strip()), count(program.strip())
            if key not in tokens:
                tokens[key] = count(document)
        except UnicodeEncodeError:
            result.skipped["records with text that is not Unicode"] += 1
            continue
        questions.add(key, tokens[key], *lengths)
    return result


def _texts(record: object, where: str) -> tuple[str, str, str]:
    """Document, question and program of a record of either data set."""
    if isinstance(record, dict) and "Context" in record:
        found = [field_of(record, key, str, where) for key in ("Context", "Question", "Program")]
        document, question, program = cast("list[str]", found)
        return document, question, program
    qa = field_of(record, "qa", dict, where)
    question = cast("str", field_of(qa, "question", str, f"{where}, qa"))
    program = cast("str", field_of(qa, "program", str, f"{where}, qa"))
    before, after = (
        _strings(field_of(record, key, list, where), f"{where}, key {key!r}")
        for key in ("pre_text", "post_text")
    )
    rows = cast("list[object]", field_of(record, "table", list, where))
    table = [" | ".join(_strings(row, f"{where}, key 'table'")) for row in rows]
    return "\n".join([*before, *table, *after]), question, program


def _strings(value: object, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{where}: must be a list of strings")
    return value
