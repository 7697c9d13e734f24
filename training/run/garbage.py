"""Python's garbage collector, at the same steps on all ranks."""

import contextlib
import gc
from collections.abc import Iterator

# Steps between two collections; each takes milliseconds.
EVERY = 50


@contextlib.contextmanager
def collecting_together() -> Iterator[None]:
    """Collect only in :func:`collect`, and never the objects that exist already.

    By itself the collector runs when a rank happens to have made enough objects, while all other
    ranks wait. Tensors are freed without it, unless they are in a reference cycle.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect(step: int) -> None:
    """Collect young objects every 50 steps."""
    if step % EVERY == 0:
        gc.collect(1)
