"""Whether a value that a file or a command line gave is of the type that a field declares.

What readers get wrong: a bool is no number and a whole number is a float, whatever ``isinstance``
says; a list stands for a tuple, because neither YAML nor JSON has any.
"""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from typing import Any, Union, get_args, get_origin


def typed(name: str, kind: Any, value: object) -> Any:
    """``value`` if it is of ``kind``; ``ValueError`` naming it."""
    if not is_of(kind, value):
        hint = whole_hint(value) if kind is not str else ""
        raise ValueError(f"{name}: {value!r} must be {_said(kind)}{hint}")
    return value


def whole_hint(value: object) -> str:
    """What to say of a whole number that was written as 1e3."""
    whole = isinstance(value, float) and value.is_integer()
    return " (write it without an exponent)" if whole else ""


def is_of(kind: Any, value: object) -> bool:
    """Whether ``value`` is of ``kind``: a class, a union or a tuple of numbers."""
    if get_origin(kind) in (Union, types.UnionType):
        return any(is_of(part, value) for part in get_args(kind))
    if get_origin(kind) is tuple:
        items = value if isinstance(value, Sequence) and not isinstance(value, str) else [None]
        return all(is_of(float, item) for item in items)
    if kind is types.NoneType:
        return value is None
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, kind)


def _said(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_said(part) for part in get_args(kind))
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}
    if get_origin(kind) is tuple:
        return "a list of numbers"
    return "null" if kind is types.NoneType else words.get(kind, str(kind))
