"""Checkpoint directories on disk: names, state and checksums. Torch-free.

``step-00000200/`` holds a torch.distributed.checkpoint, ``state.json`` and ``SHA256SUMS``, which
``sha256sum -c`` reads too.
"""

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path

from training.files import write_atomic

STATE, SUMS = "state.json", "SHA256SUMS"


class DamageError(ValueError):
    """A checkpoint is not what was written; the message says what is wrong with it."""


def checkpoint_name(step: int) -> str:
    """The directory name of a step's checkpoint."""
    return f"step-{step:08d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """Everything in ``folder`` that could be a checkpoint, whole or damaged, oldest first.

    Only a rename makes such a directory, so one that is damaged was whole once. Files, empty
    directories and other names are none.
    """
    named = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8}", path.name)]
    return sorted(path for path in named if path.is_dir() and _has_files(path))


def _has_files(folder: Path) -> bool:
    # The job that holds the run may be removing it.
    with contextlib.suppress(OSError):
        return any(folder.iterdir())
    return False


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder`` whose state can be read, oldest first."""
    return [path for path in checkpoints_in(folder) if _has_state(path)]


def _has_state(checkpoint: Path) -> bool:
    try:
        read_checkpoint_state(checkpoint)
    except DamageError:
        return False
    return True


def file_sum(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal.

    Raises:
        DamageError: if it cannot be read.
    """
    try:
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except FileNotFoundError:
        raise DamageError(f"{path.name} is missing") from None
    except OSError as error:
        raise DamageError(f"{path.name} cannot be read ({error.strerror})") from None


def write_sums(checkpoint: Path, sums: dict[str, str]) -> None:
    """Write the checksums of the files of a checkpoint, by name."""
    write_atomic(checkpoint / SUMS, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))


def read_sums(checkpoint: Path) -> dict[str, str]:
    """The checksums of the files of a checkpoint, by name.

    Raises:
        DamageError: if there are none that can be read.
    """
    try:
        lines = (checkpoint / SUMS).read_text(encoding="ascii").splitlines()
        return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except FileNotFoundError:
        raise DamageError(f"{SUMS} is missing") from None
    except (OSError, ValueError):
        raise DamageError(f"{SUMS} cannot be read") from None


def check_file(checkpoint: Path, name: str, sums: dict[str, str]) -> None:
    """Compare a file of a checkpoint with its checksum.

    Raises:
        DamageError: if it is missing, has no checksum, or another one.
    """
    if name not in sums:
        raise DamageError(f"{SUMS} does not name {name}")
    if file_sum(checkpoint / name) != sums[name]:
        raise DamageError(f"{name} differs from its checksum")


def read_checkpoint_state(checkpoint: Path) -> dict:
    """The JSON state of a checkpoint: progress, world size, mesh and identity.

    Raises:
        DamageError: if it is not the one that was written.
    """
    check_file(checkpoint, STATE, read_sums(checkpoint))
    try:
        return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except OSError as error:  # the job that holds the run has just removed it
        raise DamageError(f"{STATE} cannot be read ({error.strerror})") from None


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
