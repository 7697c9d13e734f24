"""Text → tokens on disk, once: the cache of tokenised corpora."""

import contextlib
import glob
import hashlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from common.files import sync
from common.text import printable
from training.config.schema import DataSection
from training.data.sources import DataError, Record, fault_of, one_line, open_source
from training.data.token_cache import check_content, write_meta
from training.data.tokenizer import WINDOW_CHARS, EncodingError, Tokenizer

FORMAT = 2  # of the cache; a new number makes old caches unused
BATCH_DOCUMENTS = 256


class _Builder:
    """One tokenisation of a corpus into a folder, with its counts of documents and bad records."""

    def __init__(self, section: DataSection, tokenizer: Tokenizer):
        self.section, self.tokenizer = section, tokenizer
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self.documents = self.skipped = 0

    def _skip(self, where: str, fault: str) -> None:
        if not self.section.skip_bad_records:
            raise DataError(f"{where}: {fault}; fix it or pass --skip-bad-records")
        self.skipped += 1

    def write(self, records: Iterator[Record], folder: Path) -> None:
        """Write train.bin, eval.bin and meta.json, and flush them to the disk.

        Raises:
            DataError: for a bad record, and for an id that the tokenizer should not have.
        """
        tokens, hashes = [0, 0], [hashlib.sha256(), hashlib.sha256()]
        largest, vocab_size = 0, self.tokenizer.vocab_size
        with open(folder / "train.bin", "wb") as train, open(folder / "eval.bin", "wb") as held_out:
            for text, ids in self.encode(records):
                if not len(ids):  # a text that the tokenizer drops whole would be a lone EOS
                    self.skipped += 1
                    continue
                self.documents += 1
                ids = np.append(ids, self.tokenizer.eos_id)
                largest = max(largest, int(ids.max()))
                if largest >= vocab_size:
                    raise DataError(
                        f"--tokenizer {self.tokenizer.name} gives token {largest}, which is not "
                        f"below its vocabulary of {vocab_size}: mend the tokenizer"
                    )
                data, part = ids.astype(self.dtype).tobytes(), self._is_held_out(text)
                (held_out if part else train).write(data)
                hashes[part].update(data)
                tokens[part] += len(ids)
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

    def _is_held_out(self, text: str) -> bool:
        digest = hashlib.sha256(text.encode()).digest()
        return int.from_bytes(digest[:8]) / 2**64 < self.section.eval_fraction

    def encode(self, records: Iterator[Record]) -> Iterator[tuple[str, np.ndarray | list[int]]]:
        """The usable texts with their ids, tokenised many at a time."""
        for batch in _batches(self._usable(records)):
            try:
                if len(batch) > 1 or len(batch[0][1]) <= WINDOW_CHARS:
                    texts = [text for _, text in batch]
                    yield from zip(texts, self.tokenizer.encode(texts), strict=True)
                    continue
            except EncodingError:
                pass  # the loop below tells which text it was
            for where, text in batch:
                try:
                    yield text, self.tokenizer.encode_long(text)
                except EncodingError as error:
                    self._skip(where, printable(str(error)))

    def _usable(self, records: Iterator[Record]) -> Iterator[tuple[str, str]]:
        for where, value in records:
            if fault := fault_of(value):
                self._skip(where, fault)
            else:
                yield where, value


def _batches(texts: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Texts in batches bounded by number and characters; a very long text is a batch alone."""
    batch, chars = [], 0
    for where, text in texts:
        if batch and (len(batch) == BATCH_DOCUMENTS or chars + len(text) > WINDOW_CHARS):
            yield batch
            batch, chars = [], 0
        batch.append((where, text))
        chars += len(text)
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
        # An existing entry, be it a link to nothing, is checked below and not built again.
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
    """Remove folders of killed builders of this host; a live one of this host has the lock."""
    for leftover in folder.parent.glob(f"{glob.escape(_temp_prefix(folder))}*"):
        shutil.rmtree(leftover, ignore_errors=True)


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
            # Another node was faster; the content of its folder is the same.
            if not folder.exists():
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path, log: Callable[[str], None]) -> Iterator[bool]:
    """Wait for the lock; yields False on a file system that has none, where the rename decides."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: is no regular file")
    # FileLock follows no symbolic link. Many nodes may wait: asking once a second spares the file
    # server.
    lock = FileLock(path.resolve(), poll_interval=1.0, fallback_to_soft=False)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            log(f"data: waiting for another process that holds {path}")
            lock.acquire()
    except OSError as error:
        # An error of opening the file names the file; one of locking does not.
        if error.filename is not None:
            raise
    try:
        yield lock.is_locked
    finally:
        lock.release()


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    """Use all cores while tokenising, and no threads later, so that a fork cannot deadlock."""
    set_here = "TOKENIZERS_PARALLELISM" not in os.environ
    if set_here:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if set_here:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
