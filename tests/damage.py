"""One thing of a folder made other than it was written: its bytes, its kind, its name, its mode."""

import os
import random
import re
import shutil
from pathlib import Path

NUMBERS = [b"-5", b"1e400", b"NaN", b'"20"', b"true", b"null", b"[]", b"9" * 30, b"0"]
WORDS = [b"../../x", b"/dev/zero", b"\x1b[31m", b"\n", b"\0", b"\xff"]


def _other_bytes(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    """What was done to some bytes, in words, and the bytes that came of it."""
    at = chance.randrange(len(data)) if data else 0
    numbers = [match.span() for match in re.finditer(rb"\d+", data[:100_000])]
    first, last = chance.choice(numbers) if numbers else (at, at)
    number, word = chance.choice(NUMBERS), chance.choice(WORDS)
    flipped = bytes([data[at] ^ 1 << at % 8]) if data else b"x"
    return chance.choice(
        [
            ("emptied", b""),
            ("cut short", data[:at]),
            ("with a bit flipped", data[:at] + flipped + data[at + 1 :]),
            (f"with the number {number!r}", data[:first] + number + data[last:]),
            (f"with the number {number!r}", data[:first] + number + data[last:]),
            (f"with {word!r} inside", data[:at] + word + data[at:]),
            ("longer by zeros", data + b"\0" * 5000),
            ("with its end twice", data + data[-200:]),
            ("a list", b"[1]"),
            ("nested", b'{"a":' * 50_000),
            ("nested lists", b"[" * 200_000),
        ]
    )


def _other_kind(path: Path, chance: random.Random) -> str:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    how = chance.choice(["removed", "FIFO", "file", "folder", "/dev/zero", path.name, "nowhere"])
    if how == "FIFO":
        os.mkfifo(path)
    elif how == "file":
        path.write_bytes(b"x")
    elif how == "folder":
        path.mkdir()
    elif how != "removed":
        path.symlink_to(how)
        how = f"link to {how}"
    return how


def damage(path: Path, chance: random.Random) -> str:
    """Change a file or a folder in one way; says in words which."""
    way = chance.random()
    if way < 0.6 and not path.is_dir():
        how, data = _other_bytes(path.read_bytes(), chance)
        path.write_bytes(data)
    elif way < 0.85:
        how = _other_kind(path, chance)
    elif way < 0.93:
        path.chmod(0)
        how = "without permission"
    else:
        name = chance.choice(["x", f"{path.name}0", f".{path.name}", f"{path.name}\x1b[31m"])
        path.rename(path.with_name(name))
        how = f"renamed to {name!r}"
    return f"{path.name} {how}"
