"""Records of a JSON list, read piece by piece: any chunks, any cut, any malformed byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sim.json_list
from sim.json_list import json_list

RECORDS = [{"a": "é" * 5, "b": [1, 2.5e3, True, None]}, 12345, 'te\\"xt', [], {"c": {"d": "😀"}}]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 1 << 20])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_list_reads_the_same_in_any_chunks(tmp_path, monkeypatch, chunk, ascii_only) -> None:
    monkeypatch.setattr(sim.json_list, "_CHUNK_BYTES", chunk)
    path = tmp_path / "raw.json"
    text = " \n" + json.dumps(RECORDS, indent=1, ensure_ascii=ascii_only) + "\n"
    path.write_text(text, encoding="utf-8")
    found = list(json_list(path))
    assert [record for _, record in found] == RECORDS
    data = path.read_bytes()
    for where, record in found:  # each byte offset points at its record
        start = int(where.split("byte ")[1].rstrip(")"))
        decoded, _ = json.JSONDecoder().raw_decode(data[start:].decode())
        assert decoded == record


@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_json_list_cut_off_anywhere_says_so(tmp_path, monkeypatch, chunk) -> None:
    monkeypatch.setattr(sim.json_list, "_CHUNK_BYTES", chunk)
    path = tmp_path / "raw.json"
    data = json.dumps(RECORDS, ensure_ascii=False).encode()
    for size in range(1, len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"byte \d+: .*(cut off|ends inside)") as caught:
            list(json_list(path))
        at = int(str(caught.value).split("byte ")[1].split(":")[0])
        assert size - 4 < at <= size  # a cut character starts up to three bytes before the end


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xef\xbb\xbf[1] x", "byte 7: text after the end of the array"),
        (b'[{"a": 1} {"a": 2}]', r"byte 10: '\{' follows record 0"),
        (b"[1,]", "byte 3: .*a record must follow"),
        (b'[{"a" 1, "long enough to be no cut": 0}]', "byte 6: record 0 is not JSON"),
        ('["é", "ab'.encode() + b"\xff" + b'"]', "byte 10: is not UTF-8"),
        (b"[" * 100_000, "record 0 is nested too deeply"),
    ],
)
def test_json_list_names_the_byte(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "raw.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        list(json_list(path))
