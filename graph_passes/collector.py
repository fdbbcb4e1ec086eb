"""Python's garbage collector, kept away from large graphs.

The nodes and values of a graph refer to each other, millions of them in a large one, and every full collection looks at
each again: left alone it takes as long as the work itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collections meanwhile: for work that makes much and leaves little garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def frozen() -> Iterator[None]:
    """Collections look only at what is made meanwhile."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
