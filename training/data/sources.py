"""Sources of text: files, the hub, the standard library. This module knows nothing of tokens."""

import codecs
import gzip
import io
import json
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from common.text import printable
from training.config.schema import DataSection
from training.data.text_files import DataError, check_source, suffix_of

COMPRESSED_CHUNK = 1 << 12  # a few kilobytes of zstandard may hold a hundred megabytes
# Where a record is (file:line), and its text, or the exception that says why there is none.
Record = tuple[str, object]


def one_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return printable(lines[0]) if lines else type(error).__name__


def open_source(
    section: DataSection, log: Callable[[str], None] = lambda line: None
) -> tuple[list, Callable[[], Iterator[Record]]]:
    """A JSON value that identifies the corpus without reading it, and a function that reads it.

    ``log`` gets a line on the files that are used, where a name stands for many.

    Raises:
        DataError: for a source that cannot be found.
    """
    name, column = section.dataset, section.text_column
    local = check_source(section)
    if name == "synthetic":
        return ["synthetic", 1], _synthetic
    if name == "stdlib":
        files = _stdlib_files()
        return _stats(files), lambda: _stdlib(files)
    if local is None:
        return _hub(section)
    files, line = local
    if line:
        log(line)
    return _stats(files), lambda: (r for file in files for r in _read(file, column))


def _stats(files: list[Path]) -> list:
    # The absolute path too: two trees unpacked with fixed times may differ in content alone.
    stats = [(file.absolute(), file.stat()) for file in files]
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def _synthetic() -> Iterator[Record]:
    """4096 documents, about 1 MB, of made-up words whose frequencies fall like Zipf's."""
    random = np.random.Generator(np.random.Philox(0))
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = [
        "".join(letters[(random.random(2 + n % 7) ** 2 * 26).astype(int)]) for n in range(2000)
    ]
    chances = np.cumsum(1 / np.arange(1, 2001))
    for number in range(4096):
        length = 20 + int(random.random() * 60)
        picks = np.searchsorted(chances, random.random(length) * chances[-1])
        yield f"synthetic:{number + 1}", " ".join(words[i] for i in picks) + ".\n"


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    files = [f for f in root.rglob("*.py") if not excluded & set(f.relative_to(root).parts)]
    return sorted(files)


def _stdlib(files: list[Path]) -> Iterator[Record]:
    """Files that cannot be used are skipped in silence: they are not the user's records."""
    for file in files:
        for where, value in _read_txt(file):
            if fault_of(value) is None:
                yield where, value


def _read(file: Path, column: str) -> Iterator[Record]:
    kind = suffix_of(file.name)
    if kind.startswith(".txt"):
        return _read_txt(file)
    if kind == ".parquet":
        return _read_parquet(file, column)
    return _read_jsonl(file, column)


class _Zstandard(io.RawIOBase):
    """The content of all frames of a file; ``EOFError`` if the last frame is truncated."""

    def __init__(self, file: BinaryIO):
        import zstandard

        self._file, self._error = file, zstandard.ZstdError
        # The window of zstd --long=31, which takes 2 GiB of memory to read.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame = self._decompressor.decompressobj()
        self._rest = b""  # compressed bytes after the end of a frame
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._content:
            data = self._rest or self._file.read(COMPRESSED_CHUNK)
            if not data and not self._frame.eof:
                raise EOFError("the file ends within a zstandard frame")
            if not data:
                return 0
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            try:
                self._content = memoryview(self._frame.decompress(data))
            except self._error as error:
                raise OSError(str(error)) from None
            self._rest = self._frame.unused_data if self._frame.eof else b""
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _open(file: Path) -> BinaryIO:
    compression = file.suffix.lower()
    if compression == ".zst":
        return io.BufferedReader(_Zstandard(file.open("rb")), 1 << 17)
    if compression == ".gz":
        if not file.stat().st_size:
            raise EOFError("the file is empty, and gzip writes a header at least")
        return gzip.open(file)
    return file.open("rb")


def _read_txt(file: Path) -> Iterator[Record]:
    """One record. A damaged file is one bad record, and none of its text is used."""
    name = printable(str(file))
    try:
        with _open(file) as f:
            data = f.read()
        yield f"{name}:1", data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        yield f"{name}:{line}", error
    except (OSError, EOFError, zlib.error) as error:
        yield f"{name}:1", error


def _read_jsonl(file: Path, column: str) -> Iterator[Record]:
    """One record a line; blank lines are skipped. Lines before a damaged one are still yielded."""
    name, number = printable(str(file)), 0
    try:
        with _open(file) as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    yield f"{name}:{number}", _json_text(line, column)
    except (OSError, EOFError, zlib.error) as error:
        yield f"{name}:{number + 1}", error


def _json_text(line: bytes, column: str) -> object:
    try:
        record = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
    except (ValueError, RecursionError) as error:
        return error
    if not isinstance(record, dict):
        return ValueError("not a JSON object")
    return record[column] if column in record else _no_column(column, record)


def _no_column(column: str, fields: Iterable[str]) -> ValueError:
    names = ", ".join(map(repr, fields)) or "none"
    return ValueError(f"no field {column!r} (--text-column; fields: {names})")


def _read_parquet(file: Path, column: str) -> Iterator[Record]:
    """One record a row, counted from 1."""
    import pyarrow
    from pyarrow import parquet

    name, row = printable(str(file)), 0
    try:
        with parquet.ParquetFile(file) as f:
            if column not in f.schema_arrow.names:
                yield f"{name}:row 1", _no_column(column, f.schema_arrow.names)
                return
            for batch in f.iter_batches(1024, columns=[column]):
                yield from _arrow_records(name, row, batch.column(0))
                row += len(batch)
    except (OSError, pyarrow.ArrowException) as error:
        yield f"{name}:row {row + 1}", OSError(one_line(error))


def _arrow_records(name: str, row: int, column: Iterable) -> Iterator[Record]:
    for number, scalar in enumerate(column, row + 1):
        try:
            value = scalar.as_py()
        except UnicodeDecodeError as error:  # Arrow does not check what it reads
            value = error
        yield f"{name}:row {number}", value


def _hub(section: DataSection) -> tuple[list, Callable[[], Iterator[Record]]]:
    import datasets

    name, column = section.dataset, section.text_column
    config, split = section.dataset_config, section.dataset_split
    try:
        data = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library raises nearly every type here
        raise DataError(
            f"--dataset {name} (--dataset-config {config}, --dataset-split {split}): cannot be "
            f"loaded ({one_line(error)}); name a parquet or jsonl file, or a hub dataset that "
            "needs no script"
        ) from None
    if column not in data.column_names:
        raise DataError(f"--dataset {name}: {_no_column(column, data.column_names)}")

    def records() -> Iterator[Record]:
        batches = data.select_columns([column]).with_format("arrow").iter(1024)
        for number, table in enumerate(batches):
            yield from _arrow_records(name, number * 1024, table.column(0))

    return [name, config, split, data._fingerprint], records


def fault_of(value: object) -> str | None:
    """Why the value of a record cannot be used as text; None if it can."""
    if isinstance(value, OSError | EOFError | zlib.error):
        return f"cannot be read ({one_line(value)})"
    if isinstance(value, Exception):
        return one_line(value)
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        return f"the text is {kind}, not a string"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "the text holds a lone surrogate, which is no character"
    return None if value.strip() else "the text is blank"
