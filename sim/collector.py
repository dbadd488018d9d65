"""Pausing the cyclic garbage collector where lasting objects are made by the thousand.

It runs after every few hundred new objects and looks at each of them, and at all older ones now and
then; a program's prices and templates are kept, so all of that finds nothing and takes a third of
the time. What readers get wrong: what nobody refers to is freed at once all the same. Only cycles
wait, until the pause is over.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collections inside; they go on afterwards if they did before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
