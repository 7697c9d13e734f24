"""The files of a folder of tokens, and the checks before they are trusted. Torch-free."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.files import open_regular, read_json, sync
from training.data.sources import DataError, one_line

PARTS = ("train", "eval")
BLOCK = 1 << 20
# Up to this size a file is hashed whole at each start, which takes a fraction of a second.
HASHED_WHOLE = 1 << 26

Count = Annotated[int, Field(ge=0, le=1 << 48)]
Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]


class TokensMeta(BaseModel):
    """``meta.json``, which is written last. ``ends`` are the first and the last block of a file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    documents: Count
    skipped_records: Count
    train_tokens: Count
    eval_tokens: Count
    dtype: Literal["<u2", "<u4"]
    largest_id: Count
    train_sha256: Digest
    eval_sha256: Digest
    train_ends_sha256: Digest
    eval_ends_sha256: Digest
    train_mtime_ns: int
    eval_mtime_ns: int
    tokenizer: str


def write_meta(folder: Path, **counts) -> None:
    """Complete a folder of ``train.bin`` and ``eval.bin``; all files are on disk on return.

    ``counts`` are the fields of :class:`TokensMeta` that are not read from the two files.
    """
    for part in PARTS:
        path = folder / f"{part}.bin"
        sync(path)
        with path.open("rb") as file:
            counts[f"{part}_ends_sha256"] = _ends_sha256(file)
            counts[f"{part}_mtime_ns"] = os.fstat(file.fileno()).st_mtime_ns
    (folder / "meta.json").write_text(TokensMeta(**counts).model_dump_json(indent=1))
    for path in (folder / "meta.json", folder):
        sync(path)


def read_meta(folder: Path) -> TokensMeta:
    """Read ``meta.json``.

    Raises:
        DataError: if there is none, or it is not valid.
    """
    with _naming(folder, "meta.json"):
        try:
            return TokensMeta.model_validate(read_json(folder / "meta.json", 1 << 16))
        except ValidationError as error:
            fault = error.errors()[0]
            raise ValueError(" ".join([*map(str, fault["loc"]), fault["msg"]])) from None


@contextlib.contextmanager
def open_part(folder: Path, part: str, meta: TokensMeta) -> Iterator[BinaryIO]:
    """Open ``train.bin`` or ``eval.bin``, a regular file of the size that ``meta`` says.

    Raises:
        DataError: if the file is another, and for a ``ValueError`` of the caller.
    """
    expected = getattr(meta, f"{part}_tokens") * int(meta.dtype[-1])
    with _naming(folder, f"{part}.bin"), open_regular(folder / f"{part}.bin") as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected:
            raise ValueError(f"has {size} bytes, not {expected}")
        yield file


def check_content(
    folder: Path, vocab_size: int, tokenizer: str, log: Callable[[str], None]
) -> TokensMeta:
    """Compare the two files with what was recorded when they were written.

    A file of up to 64 MiB is hashed whole, and so is a larger one whose modification time is not
    the recorded one; of any other the first and the last block are.

    Args:
        tokenizer: the fingerprint of the tokenizer.

    Raises:
        DataError: if the files differ, or an id is not below ``vocab_size``.
    """
    meta = read_meta(folder)
    with _naming(folder, "meta.json"):
        if meta.tokenizer != tokenizer:
            raise ValueError("the tokens are of another tokenizer")
        if meta.largest_id >= vocab_size:
            raise ValueError(f"token {meta.largest_id} is not below the vocabulary of {vocab_size}")
    for part in PARTS:
        with open_part(folder, part, meta) as file:
            info = os.fstat(file.fileno())
            touched = info.st_mtime_ns != getattr(meta, f"{part}_mtime_ns")
            large = info.st_size > HASHED_WHOLE
            if large and touched:
                log(f"data: hashing {folder / part}.bin, which was copied or touched")
            if large and not touched:
                digest, written = _ends_sha256(file), getattr(meta, f"{part}_ends_sha256")
            else:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                written = getattr(meta, f"{part}_sha256")
            if digest != written:
                raise ValueError("holds other tokens than were written")
    return meta


def _ends_sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256(file.read(BLOCK))
    file.seek(max(0, file.seek(0, os.SEEK_END) - BLOCK))
    digest.update(file.read(BLOCK))
    return digest.hexdigest()


@contextlib.contextmanager
def _naming(folder: Path, name: str) -> Iterator[None]:
    """Turn an error of a file of the folder into one line that names the file and the fix."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else one_line(error)
        raise DataError(
            f"token cache {folder} is damaged ({name}: {why}): delete the folder, "
            "and the next start builds it again"
        ) from None
    except OSError as error:
        raise DataError(
            f"token cache {folder} cannot be read ({name}: {error.strerror}): get the right to "
            "read it, or set PARALLEL_RECIPES_CACHE to another folder"
        ) from None
