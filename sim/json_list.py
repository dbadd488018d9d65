"""Streaming a JSON array of records that is larger than memory should hold.

Records come out one at a time; only the text around the current one is kept. What readers get
wrong: an array that was cut off is readable up to the cut, so the error comes after the records
before it, and a caller that needs the whole file must not write a result before the end.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_CHUNK_BYTES = 1 << 20
_LONGEST_ATOM = 16  # a cut literal, number or escape is reported this close to the cut
_NOT_SPACE = re.compile(r"[^ \t\n\r]")


class _Text:
    """Decoded text of a file around a cursor, extended on demand."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.text = ""
        self.cursor = 0
        self.ended = False
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._read_bytes = 0
        self._counted = 0  # the character whose byte offset is known ...
        self._counted_bytes = 0  # ... and that offset

    def more(self) -> None:
        """Drop what is behind the cursor; read at least as much again as is left.

        Doubling keeps the cost of a long record linear.
        """
        self.byte(self.cursor)
        self.text = self.text[self.cursor :]
        self.cursor = self._counted = 0
        pending = len(self._decoder.getstate()[0])
        chunk = self._file.read(max(_CHUNK_BYTES, len(self.text)))
        try:
            self.text += self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            at = self._read_bytes - pending + error.start
            reason = f"is not UTF-8 ({error.reason})" if chunk else "ends inside a character"
            raise ValueError(f"{self.path}, byte {at}: {reason}") from error
        self._read_bytes += len(chunk)
        self.ended = not chunk

    def byte(self, position: int) -> int:
        """Byte offset in the file of a character at or after the last one asked for."""
        self._counted_bytes += len(self.text[self._counted : position].encode())
        self._counted = position
        return self._counted_bytes

    def peek(self) -> str:
        """Move to the next character that is not white space; it is empty at the end."""
        while True:
            found = _NOT_SPACE.search(self.text, self.cursor)
            self.cursor = found.start() if found else len(self.text)
            if found or self.ended:
                return found.group() if found else ""
            self.more()

    def fail(self, problem: str) -> ValueError:
        """An error at the cursor."""
        return ValueError(f"{self.path}, byte {self.byte(self.cursor)}: {problem}")


def json_list(path: Path) -> Iterator[tuple[str, object]]:
    """``(where, record)`` of every record of a file that is one JSON array.

    ``where`` names file, record (from 0) and byte offset, for messages. Raises ``ValueError`` with
    the byte offset where the file is cut off, is not JSON, is not an array or goes on after it.
    """
    if not path.is_file():
        raise ValueError(f"{path}: {'is not a file' if path.exists() else 'does not exist'}")
    with path.open("rb") as file:
        text = _Text(path, file)
        if text.peek() == "\ufeff":
            text.cursor += 1
        if text.peek() != "[":
            raise text.fail("must start with '[', a JSON array")
        text.cursor += 1
        index = 0
        closed = text.peek() == "]"
        while not closed:
            if text.peek() in ("", "]"):
                raise text.fail(f"cut off after {index} records, a record must follow")
            where = f"{path}, record {index} (byte {text.byte(text.cursor)})"
            yield where, _record(text, index)
            index += 1
            separator = text.peek()
            if separator not in (",", "]"):
                problem = f"{separator!r} follows" if separator else "cut off: the file ends after"
                raise text.fail(f"{problem} record {index - 1}, it must be ',' or ']'")
            closed = separator == "]"
            text.cursor += not closed
        text.cursor += 1
        if text.peek():
            raise text.fail("text after the end of the array")


def _record(text: _Text, index: int) -> object:
    """Decode the record at the cursor and move behind it, reading on until it is complete."""
    decoder = json.JSONDecoder()
    while True:
        try:
            record, stop = decoder.raw_decode(text.text, text.cursor)
        except json.JSONDecodeError as error:
            near_end = error.pos >= len(text.text) - _LONGEST_ATOM
            if not near_end and not error.msg.startswith("Unterminated string"):
                text.cursor = error.pos
                raise text.fail(f"record {index} is not JSON ({error.msg})") from error
            if text.ended:
                start = text.byte(text.cursor)
                text.cursor = len(text.text)
                raise text.fail(
                    f"the file ends in record {index}, which starts at byte {start}: "
                    f"cut off or not JSON ({error.msg})"
                ) from error
        except RecursionError as error:
            raise text.fail(f"record {index} is nested too deeply") from error
        else:
            if stop < len(text.text) or text.ended:  # else a number might go on
                text.cursor = stop
                return record
        text.more()
