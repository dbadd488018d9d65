"""Integer columns in CSV and Parquet files: what every length trace is made of.

Every value is an integer in ``0..MAX_VALUE``; a column named optional may be absent or hold nulls,
which come back as ``NULL``. What readers get wrong: a file that was cut off in the middle is not a
shorter file. Each bad line is an error that names file, line and column, none is skipped.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

NULL = -1
MAX_VALUE = 2**31 - 1
EXTENSIONS = (".csv", ".parquet")


def check_extension(path: Path) -> str:
    """Lower-case extension of ``path``; ``ValueError`` unless it is one of ``EXTENSIONS``."""
    extension = path.suffix.lower()
    if extension not in EXTENSIONS:
        raise ValueError(f"{path}: extension {extension!r} must be one of {', '.join(EXTENSIONS)}")
    return extension


def read_columns(
    path: Path, required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, NDArray[np.int64]]:
    """Columns ``required`` and ``optional`` of a trace, each of shape (n_rows,).

    Optional columns that the file lacks are left out of the result; their nulls are ``NULL``.
    Raises ``ValueError`` for a file that is missing, empty, cut off or garbled, for a required
    column that is missing, and for a value that is not an integer in ``0..MAX_VALUE``.
    """
    extension = check_extension(path)
    if not path.is_file():
        raise ValueError(f"{path}: {'is not a file' if path.exists() else 'does not exist'}")
    read = _read_csv if extension == ".csv" else _read_parquet
    columns = read(path, required, optional)
    if not next(iter(columns.values())).size:
        raise ValueError(f"{path}: is empty, it has a header but no rows")
    return columns


def csv_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number (1-based, the last line of a row) and fields by column of each row of a CSV.

    Blank lines are no rows. Raises ``ValueError`` for an empty file, a repeated column, text that
    is not UTF-8 and a line that has not as many fields as the header.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            if not header:
                raise ValueError(f"{path}: is empty, it must start with a header line")
            if len(set(header)) < len(header):
                raise ValueError(f"{path}, line 1: a column name is repeated: {', '.join(header)}")
            for row in reader:
                if row and len(row) != len(header):
                    raise ValueError(
                        f"{path}, line {reader.line_num}: {len(row)} fields, the header has "
                        f"{len(header)} (cut off or garbled)"
                    )
                if row:
                    yield reader.line_num, dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error} (cut off?)") from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}, after line {reader.line_num}: is not UTF-8 text ({error.reason})"
            ) from error


def require_columns(path: Path, present: Sequence[str], required: Sequence[str]) -> None:
    """``ValueError`` naming the first required column that is not present."""
    for name in required:
        if name not in present:
            raise ValueError(f"{path}: column {name!r} is missing, it has {', '.join(present)}")


def parse_count(text: str, where: str) -> int:
    """An integer in ``0..MAX_VALUE``; ``where`` opens the message of the ``ValueError``."""
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()) or int(digits) > MAX_VALUE:
        raise ValueError(f"{where}: {text!r} must be an integer in 0..{MAX_VALUE}")
    return int(digits)


def _read_csv(
    path: Path, required: Sequence[str], optional: Sequence[str]
) -> dict[str, NDArray[np.int64]]:
    rows = csv_rows(path)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{path}: is empty, it has a header but no rows")
    present = list(first[1])
    require_columns(path, present, required)
    columns: dict[str, list[int]] = {n: [] for n in (*required, *optional) if n in present}
    for line, row in chain([first], rows):
        for name, values in columns.items():
            text = row[name]
            if name in optional and not text.strip():
                values.append(NULL)
            else:
                values.append(parse_count(text, f"{path}, line {line}, column {name}"))
    return {name: np.array(values, dtype=np.int64) for name, values in columns.items()}


def _read_parquet(
    path: Path, required: Sequence[str], optional: Sequence[str]
) -> dict[str, NDArray[np.int64]]:
    try:
        present = pq.read_schema(path).names
        require_columns(path, present, required)
        table = pq.read_table(path, columns=[n for n in (*required, *optional) if n in present])
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: is not a readable Parquet file ({error})") from error
    return {
        name: _integers(table.column(name).to_pandas(), name in optional, f"{path}, column {name}")
        for name in table.column_names
    }


def _integers(series: pd.Series, nullable: bool, where: str) -> NDArray[np.int64]:
    """A Parquet column as integers; ``ValueError`` naming the first row (from 1) that is not."""
    null = series.isna().to_numpy(dtype=bool)
    if null.all() and nullable:
        return np.full(len(series), NULL, dtype=np.int64)
    if series.dtype.kind not in "iuf":
        raise ValueError(f"{where}: has type {series.dtype}, it must be an integer type")
    values = series.to_numpy(dtype=np.float64, na_value=np.nan)  # exact up to 2^53 > MAX_VALUE
    good = (values >= 0) & (values <= MAX_VALUE) & (values == np.floor(values))
    bad = ~(good | null) if nullable else ~good
    if bad.any():
        row = int(np.argmax(bad))
        shown = "null" if null[row] else f"{values[row]:.15g}"
        raise ValueError(f"{where}, row {row + 1}: {shown} must be an integer in 0..{MAX_VALUE}")
    return np.where(null, NULL, values).astype(np.int64)


def write_columns(
    path: Path,
    columns: Mapping[str, Sequence[int]],
    lists: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> None:
    """Write columns of integers (and columns of lists, which only Parquet can hold) atomically.

    A reader finds the old file or the whole new one, never a part. CSV leaves the lists out.
    """
    if check_extension(path) == ".csv":
        write_atomically(path, lambda part: _write_csv(part, columns))
        return
    arrays = {name: pa.array(values, pa.int64()) for name, values in columns.items()}
    arrays |= {n: pa.array(values, pa.list_(pa.int64())) for n, values in (lists or {}).items()}
    write_atomically(path, lambda part: pq.write_table(pa.table(arrays), part, compression="zstd"))


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file next to ``path``, then rename it to ``path``."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_csv(path: Path, columns: Mapping[str, Sequence[int]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
