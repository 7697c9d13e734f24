"""Numbers, bytes, durations and tables as text. Torch-free."""

from collections.abc import Iterable, Sequence
from typing import Any

GIB = 2**30


def columns(table: Sequence[Sequence[object]]) -> list[str]:
    """The rows of a table as lines of aligned columns."""
    text = [[str(cell) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in text
    ]


def bytes_of(size: float) -> str:
    """Bytes in MiB, or GiB where there are many."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def count_of(number: float) -> str:
    """2100 as 2.1k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """108 seconds as 1m48s."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{seconds:02d}s"


def rank_ranges(ranks: Iterable[int]) -> str:
    """0, 1, 2, 3 and 7 as ``0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def printable(text: str) -> str:
    """``text`` in one line, with everything escaped that a terminal would act on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(value: Any) -> str:
    """A JSON value as text for one line; of a long one its beginning, of a nested one its kind."""
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = printable(repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
