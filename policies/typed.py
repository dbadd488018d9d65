"""Whether values that a file or a command line gave are those that a dataclass declares.

What readers get wrong: a bool is no number and a whole number is a float, whatever ``isinstance``
says; a list stands for a tuple, because neither YAML nor JSON has any.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

_ONE = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text",
        types.NoneType: "null"}  # fmt: skip
_MANY = {int: "whole numbers", float: "numbers", str: "texts"}


def checked(root: str, cls: type[Any], data: Mapping[str, object]) -> dict[str, Any]:
    """``data`` if it has the fields of dataclass ``cls``, each of its declared type.

    ``ValueError`` for a field that is unknown, missing or of another type.
    """
    hints = get_type_hints(cls)
    known = [field.name for field in fields(cls)]
    for key in data:
        if key not in known:
            raise ValueError(unknown_key(root, key, known))
    for field in fields(cls):
        optional = field.default is not MISSING or field.default_factory is not MISSING
        if field.name not in data and not optional:
            raise ValueError(f"{root}.{field.name}: is missing, {cls.__name__} needs it")
    return {key: typed(f"{root}.{key}", hints[key], value) for key, value in data.items()}


def unknown_key(root: str, key: object, known: Iterable[object]) -> str:
    """Message that names an unknown key, its nearest neighbours and all that exist."""
    names = sorted(str(name) for name in known)
    full = f"{root}.{key}" if root else str(key)
    return f"{full}: unknown key{nearest(str(key), names)}; the keys here are {', '.join(names)}"


def nearest(word: str, names: Sequence[str]) -> str:
    """The question whether a name that is much like ``word`` was meant; empty if none is."""
    close = difflib.get_close_matches(word, names, n=2, cutoff=0.6)
    return f", did you mean {' or '.join(close)}?" if close else ""


def typed(name: str, kind: Any, value: object) -> Any:
    """``value`` if it is of ``kind``, else ``ValueError`` naming it.

    ``TypeError``, naming it as well, for a kind that ``is_of`` does not know.
    """
    try:
        fits = is_of(kind, value)
    except TypeError as error:
        raise TypeError(f"{name}: no value can be checked against {kind} ({error})") from error
    if not fits:
        hint = whole_hint(value) if kind is not str else ""
        raise ValueError(f"{name}: {value!r} must be {_said(kind)}{hint}")
    return value


def whole_hint(value: object) -> str:
    """What to say of a whole number that was written as 1e3."""
    whole = isinstance(value, float) and value.is_integer()
    return " (write it without an exponent)" if whole else ""


def is_of(kind: Any, value: object) -> bool:
    """Whether ``value`` is of ``kind``: a class, a union or ``tuple[ITEM, ...]``."""
    if get_origin(kind) in (Union, types.UnionType):
        return any(is_of(part, value) for part in get_args(kind))
    if get_origin(kind) is tuple:
        item = _item(kind)
        return isinstance(value, list | tuple) and all(is_of(item, part) for part in value)
    if kind is types.NoneType:
        return value is None
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, kind)


def _item(kind: Any) -> Any:
    """Type of the items of ``tuple[ITEM, ...]``."""
    item, *rest = get_args(kind)
    if rest != [...]:
        raise TypeError("a tuple must be of any length, of one type")
    return item


def _said(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_said(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list of {_MANY.get(_item(kind), str(_item(kind)))}"
    return _ONE.get(kind, str(kind))
