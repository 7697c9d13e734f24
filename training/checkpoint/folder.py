"""Checkpoint directories on disk: names, state and checksums. Torch-free.

``step-00000200/`` holds a torch.distributed.checkpoint, ``state.json`` and ``SHA256SUMS``, which
``sha256sum -c`` reads too. A checkpoint may come from elsewhere: only regular files inside its
folder are read, no more of them than they can need, and every number is checked.
"""

import hashlib
import json
import os
import re
import stat
from pathlib import Path

from common.files import names_in, read_bounded, readable, write_atomic
from common.text import printable

STATE, SUMS = "state.json", "SHA256SUMS"
# Of a run directory, where its checkpoints are.
CHECKPOINTS = "checkpoints"
MAX_STATE_BYTES, MAX_SUMS_BYTES = 1 << 20, 1 << 24
_SUM = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9_.-]{1,255})")
# What state.json counts, and the least of each.
_COUNTS = {"step": 0, "tokens": 0, "skipped_steps": 0, "world_size": 1}


class DamageError(ValueError):
    """A checkpoint is not what was written; the message says what is wrong with it."""


def checkpoint_name(step: int) -> str:
    """The directory name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's directory name; None if it is no such name."""
    number = re.fullmatch(r"step-([0-9]{8,18})", name)
    return int(number[1]) if number and checkpoint_name(int(number[1])) == name else None


def checkpoints_in(folder: Path) -> list[Path]:
    """Everything in ``folder`` that could be a checkpoint, whole or damaged, oldest first.

    Only a rename makes such a directory, so one that is damaged was whole once. Files, empty
    directories and other names are none.

    Raises:
        ConfigError: if that cannot be known, as where the permission is missing.
    """
    steps = sorted(step for name in names_in(folder) if (step := step_of(name)) is not None)
    paths = [folder / checkpoint_name(step) for step in steps]
    return [path for path in paths if _is_folder(path) and names_in(path)]


def _is_folder(path: Path) -> bool:
    with readable(path):
        # A link that leads nowhere is told by names_in.
        return path.is_symlink() or stat.S_ISDIR(os.lstat(path).st_mode)
    return False


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder`` whose state can be read, oldest first.

    Raises:
        ConfigError: as :func:`checkpoints_in`.
    """
    return [path for path in checkpoints_in(folder) if _has_state(path)]


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in ``folder`` whose state can be read, or None.

    Raises:
        ConfigError: as :func:`checkpoints_in`.
    """
    return next(filter(_has_state, reversed(checkpoints_in(folder))), None)


def _has_state(checkpoint: Path) -> bool:
    try:
        read_checkpoint_state(checkpoint)
    except DamageError:
        return False
    return True


def file_size(path: Path) -> int:
    """The size of a regular file of a checkpoint.

    Raises:
        DamageError: if it is missing, or anything else, a link included, which may lead outside.
        ConfigError: if that cannot be known.
    """
    with readable(path):
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise DamageError(f"{path.name} is no regular file")
        return status.st_size
    raise DamageError(f"{path.name} is missing")


def file_sum(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal.

    Raises:
        DamageError, ConfigError: as :func:`file_size`.
    """
    file_size(path)
    with readable(path), path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
    raise DamageError(f"{path.name} is missing")


def _read(path: Path, limit: int) -> bytes:
    file_size(path)
    with readable(path):
        try:
            return read_bounded(path, limit)
        except ValueError as error:
            raise DamageError(f"{path.name} {error}") from None
    raise DamageError(f"{path.name} is missing")


def write_sums(checkpoint: Path, sums: dict[str, str]) -> None:
    """Write the checksums of the files of a checkpoint, by name."""
    write_atomic(checkpoint / SUMS, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))


def read_sums(checkpoint: Path) -> dict[str, str]:
    """The checksums of the files of a checkpoint, by name; the names are plain ones.

    Raises:
        DamageError: if there are none that can be read.
        ConfigError: as :func:`file_size`.
    """
    sums = {}
    text = _read(checkpoint / SUMS, MAX_SUMS_BYTES).decode("utf-8", errors="replace")
    for line in text.removesuffix("\n").split("\n"):
        match = _SUM.fullmatch(line)
        if not match or match[2] in (".", "..", SUMS):
            raise DamageError(f"{SUMS} has a line that names no file of it: {_shown(line)}")
        if match[2] in sums:
            raise DamageError(f"{SUMS} names {match[2]} twice")
        sums[match[2]] = match[1]
    return sums


def _shown(value: object) -> str:
    text = printable(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= 60 else text[:60] + "..."


def check_file(checkpoint: Path, name: str, sums: dict[str, str]) -> None:
    """Compare a file of a checkpoint with its checksum.

    Raises:
        DamageError: if it is missing, has no checksum, or another one.
        ConfigError: as :func:`file_size`.
    """
    if name not in sums:
        raise DamageError(f"{SUMS} does not name {name}")
    if file_sum(checkpoint / name) != sums[name]:
        raise DamageError(f"{name} differs from its checksum")


def read_checked(checkpoint: Path, name: str, sums: dict[str, str], limit: int) -> bytes:
    """The content of a small file of a checkpoint, compared with its checksum.

    Raises:
        DamageError: as :func:`check_file`, and if it has more than ``limit`` bytes.
        ConfigError: as :func:`file_size`.
    """
    if name not in sums:
        raise DamageError(f"{SUMS} does not name {name}")
    data = _read(checkpoint / name, limit)
    if hashlib.sha256(data).hexdigest() != sums[name]:
        raise DamageError(f"{name} differs from its checksum")
    return data


def read_checkpoint_state(checkpoint: Path) -> dict:
    """The JSON state of a checkpoint: progress, world size, mesh and identity.

    Raises:
        DamageError: if it is not the one that was written.
        ConfigError: as :func:`file_size`.
    """
    data = read_checked(checkpoint, STATE, read_sums(checkpoint), MAX_STATE_BYTES)
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        raise DamageError(f"{STATE} is no JSON that can be read") from None
    if not isinstance(state, dict) or not isinstance(state.get("identity"), dict):
        raise DamageError(f"{STATE} is no object with an identity")
    for key, least in _COUNTS.items():
        value = state.get(key)
        if type(value) is not int or not least <= value < 1 << 63:
            raise DamageError(f"{STATE} has {_shown(value)} as {key}, which is no count")
    named = step_of(checkpoint.name)
    if named is not None and named != state["step"]:
        raise DamageError(f"{STATE} is of step {state['step']}, the folder's name is not")
    return state


def put_aside(path: Path, label: str) -> Path:
    """Rename ``path`` to a name that is no checkpoint's; nothing is deleted. Returns the new path.

    ``label`` ends the name, with a number where that is taken.
    """
    aside, count = path.with_name(f"{path.name}.{label}"), 1
    while os.path.lexists(aside):
        count += 1
        aside = path.with_name(f"{path.name}.{label}-{count}")
    os.rename(path, aside)
    return aside
