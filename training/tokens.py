"""Text → tokens on disk, once: the tokenizer, and the cache of what it makes of a corpus."""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from training.config import DataSection
from training.files import sync
from training.text import DataError, Record, fault_of, one_line, open_source
from training.token_cache import check_content, write_meta

FORMAT = 2  # of the cache; a new number leaves old caches unread
BATCH_DOCUMENTS = 256
# An encoding takes about 100 bytes of memory per token before it becomes 2 or 4 bytes on disk.
BATCH_CHARS = 1 << 20


@dataclass(frozen=True)
class Tokenizer:
    """A fast tokenizer that adds nothing by itself: no BOS, no EOS, no padding, no truncation.

    ``vocab_size`` is the largest id it can emit plus one; ``fingerprint`` is a hash of its content.
    """

    name: str
    vocab_size: int
    eos_id: int
    fingerprint: str
    backend: object  # tokenizers.Tokenizer

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, without special tokens even where a template would add them."""
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, special tokens included."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(name: str) -> Tokenizer:
    """The built-in byte tokenizer (``bytes``), or a fast tokenizer by path or hub name.

    Raises:
        DataError: if it is not found, has no fast version, or has no EOS token.
    """
    backend, eos_id = _byte_backend() if name == "bytes" else _hf_backend(name)
    # Settings of a saved tokenizer that would silently cut or fill documents.
    backend.no_truncation()
    backend.no_padding()
    vocab_size = max(eos_id, *backend.get_vocab(with_added_tokens=True).values()) + 1
    fingerprint = hashlib.sha256(f"{eos_id} {backend.to_str()}".encode()).hexdigest()
    return Tokenizer(name, vocab_size, eos_id, fingerprint, backend)


def _byte_backend():
    """BPE without merges: byte b is id b. 256 is EOS, which no text can spell."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # ByteLevel writes printable bytes as themselves and the others, in order, as chr(256), ...
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    vocab = {chr(b if b in printable else next(others)): b for b in range(256)}
    vocab["<|endoftext|>"] = 256
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], cache_capacity=0))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend, 256


def _hf_backend(name: str):
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the library raises nearly every type here
        raise DataError(
            f"--tokenizer {name}: cannot be loaded ({one_line(error)}); name a folder with "
            "tokenizer.json, a reachable hub name, or bytes"
        ) from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DataError(f"--tokenizer {name}: has no fast version; use one with a tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"--tokenizer {name}: has no EOS token to separate documents; "
            'set "eos_token" in its tokenizer_config.json'
        )
    return backend, tokenizer.eos_token_id


class Piece(NamedTuple):
    """A document, or a part of a very long one."""

    text: str
    held_out: bool
    last: bool


class _Builder:
    """One tokenisation of a corpus into a folder: what is written, and what is counted."""

    def __init__(self, section: DataSection, tokenizer: Tokenizer):
        self.section, self.tokenizer = section, tokenizer
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self.documents = self.skipped = 0

    def pieces(self, records: Iterator[Record]) -> Iterator[Piece]:
        """Usable texts; a very long one is cut at line ends, so that its ids never pile up."""
        for where, value in records:
            if fault := fault_of(value):
                if not self.section.skip_bad_records:
                    raise DataError(f"{where}: {fault}; fix it or pass --skip-bad-records")
                self.skipped += 1
                continue
            digest = hashlib.sha256(value.encode()).digest()
            held_out = int.from_bytes(digest[:8]) / 2**64 < self.section.eval_fraction
            start = 0
            while len(value) - start > BATCH_CHARS:
                end = value.rfind("\n", start, start + BATCH_CHARS) + 1 or start + BATCH_CHARS
                yield Piece(value[start:end], held_out, last=False)
                start = end
            yield Piece(value[start:], held_out, last=True)

    def write(self, records: Iterator[Record], folder: Path) -> None:
        """Write train.bin, eval.bin and meta.json, all of them flushed to the disk.

        Raises:
            DataError: for a bad record, and for an id that the tokenizer should not have.
        """
        tokens, hashes, length = [0, 0], [hashlib.sha256(), hashlib.sha256()], 0
        largest, vocab_size = 0, self.tokenizer.vocab_size
        with open(folder / "train.bin", "wb") as train, open(folder / "eval.bin", "wb") as held_out:
            for piece, ids in self.encode(records):
                length += len(ids)
                if piece.last:
                    # A text that the tokenizer drops whole would leave a lone EOS.
                    ids = [*ids, self.tokenizer.eos_id] if length else []
                    self.documents += length > 0
                    self.skipped += length == 0
                    length = 0
                ids = np.array(ids, np.int64)
                largest = max(largest, int(ids.max(initial=0)))
                if largest >= vocab_size:
                    raise DataError(
                        f"--tokenizer {self.tokenizer.name} gives token {largest}, which is not "
                        f"below its vocabulary of {vocab_size}: mend the tokenizer"
                    )
                data = ids.astype(self.dtype).tobytes()
                (held_out if piece.held_out else train).write(data)
                hashes[piece.held_out].update(data)
                tokens[piece.held_out] += len(ids)
        write_meta(
            folder,
            documents=self.documents,
            skipped_records=self.skipped,
            train_tokens=tokens[0],
            eval_tokens=tokens[1],
            dtype=self.dtype.str,
            largest_id=largest,
            train_sha256=hashes[0].hexdigest(),
            eval_sha256=hashes[1].hexdigest(),
            tokenizer=self.tokenizer.fingerprint,
        )

    def encode(self, records: Iterator[Record]) -> Iterator[tuple[Piece, list[int]]]:
        """The pieces of the usable records with their ids, tokenised many at a time."""
        for batch in _batches(self.pieces(records)):
            yield from zip(batch, self.tokenizer.encode([p.text for p in batch]), strict=True)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch, chars = [], 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if len(batch) == BATCH_DOCUMENTS or chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def default_cache_dir() -> Path:
    """$PARALLEL_RECIPES_CACHE, or parallel-recipes below $XDG_CACHE_HOME or ~/.cache."""
    try:
        if folder := os.environ.get("PARALLEL_RECIPES_CACHE"):
            return Path(folder).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parallel-recipes"
    except RuntimeError:
        raise DataError(
            "no home directory to cache tokens in: set PARALLEL_RECIPES_CACHE to a folder"
        ) from None


def prepare_tokens(
    section: DataSection,
    tokenizer: Tokenizer,
    cache_dir: Path | None = None,
    log: Callable[[str], None] = print,
) -> Path:
    """Find or build the tokenised corpus; returns its folder (train.bin, eval.bin, meta.json).

    For one process per node. The folder appears complete or not at all; builders on other nodes or
    in other jobs wait for the first one where the file system has locks, else they build the same.

    Raises:
        DataError: for a source that cannot be found or holds no usable text, for the first bad
            record unless they are to be skipped, and for a cache that cannot be written.
    """
    cache = cache_dir or default_cache_dir()
    identity, records = open_source(section, log)
    key = [FORMAT, identity, tokenizer.fingerprint, section.text_column]
    key += [section.eval_fraction, section.skip_bad_records]
    folder = cache / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    start, how = time.monotonic(), "from the cache"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # What is there, be it a link to nothing, is checked below and not built anew.
        if not os.path.lexists(folder):
            with _lock(folder.with_suffix(".lock"), log) as alone, _threads():
                if not os.path.lexists(folder):
                    log(f"data: tokenising {section.dataset} with {tokenizer.name} into {folder}")
                    if alone:
                        _remove_leftovers(folder)
                    _build(section, tokenizer, records, folder)
                    how = "tokenised"
    except OSError as error:
        raise DataError(
            f"token cache {folder}: {one_line(error)}; make room, delete it, or set "
            "PARALLEL_RECIPES_CACHE to another folder"
        ) from None
    meta = check_content(folder, tokenizer.vocab_size, tokenizer.fingerprint, log)
    log(
        f"data: {section.dataset} {how}: {meta.documents} documents, "
        f"{meta.train_tokens} train and {meta.eval_tokens} held-out tokens, "
        f"{meta.skipped_records} records skipped, {time.monotonic() - start:.1f} s"
    )
    if section.eval_fraction and not meta.eval_tokens:
        log(f"data: no document is held out with --eval-fraction {section.eval_fraction}")
    return folder


def _temp_prefix(folder: Path) -> str:
    return f"{folder.name}.tmp-{socket.gethostname()}-"


def _remove_leftovers(folder: Path) -> None:
    """What killed builders of this host left; a live one of this host would hold the lock."""
    for left in folder.parent.glob(f"{glob.escape(_temp_prefix(folder))}*"):
        shutil.rmtree(left, ignore_errors=True)


def _build(section: DataSection, tokenizer: Tokenizer, records: Callable, folder: Path) -> None:
    temp = folder.with_name(f"{_temp_prefix(folder)}{uuid.uuid4().hex[:8]}")
    temp.mkdir()
    try:
        builder = _Builder(section, tokenizer)
        builder.write(records(), temp)
        if not builder.documents:
            raise DataError(
                f"--dataset {section.dataset}: no usable text ({builder.skipped} bad records)"
            )
        try:
            os.rename(temp, folder)
        except OSError:
            # Another node was faster: its folder stays, the content is the same.
            if not folder.exists():
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path, log: Callable[[str], None]) -> Iterator[bool]:
    """Wait for the lock; yields False on a file system that has none, where the rename decides."""
    # As it is: without waiting for the writer of a FIFO, or emptying what a link names.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
    with os.fdopen(fd, "w") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path}: is no regular file")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"data: waiting for another process that holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    """All cores while tokenising, none of its threads later: a fork after it must not deadlock."""
    set_here = "TOKENIZERS_PARALLELISM" not in os.environ
    if set_here:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if set_here:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
