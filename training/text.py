"""Where text comes from: files, the hub, the standard library. Knows nothing of tokens."""

import codecs
import glob
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from training.config import ConfigError, DataSection

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")

# Where a record is (file:line), and its text, or the exception that says why there is none.
Record = tuple[str, object]


class DataError(ConfigError):
    """Bad data; the message is one line naming file and line (or the flag) and the fix."""


def one_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def open_source(section: DataSection) -> tuple[list, Callable[[], Iterator[Record]]]:
    """What identifies the corpus cheaply, without reading it, and a function that reads it."""
    name, column = section.dataset, section.text_column
    if name == "synthetic":
        return ["synthetic", 1], _synthetic
    if name == "stdlib":
        files = _stdlib_files()
        return _stats(files), lambda: _stdlib(files)
    files = local_files(name)
    if files is None:
        return _hub(section)
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
    left_out = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    files = [f for f in root.rglob("*.py") if not left_out & set(f.relative_to(root).parts)]
    return sorted(files)


def _stdlib(files: list[Path]) -> Iterator[Record]:
    """What cannot be used here is left out in silence: these are not the user's records."""
    for file in files:
        for where, value in _read_txt(file):
            if fault_of(value) is None:
                yield where, value


def local_files(name: str) -> list[Path] | None:
    """The files a path or glob stands for, sorted; None if the name can only be one of the hub."""
    path = Path(name).expanduser()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = [p for p in path.rglob("*") if p.is_file()]
    elif glob.has_magic(name):
        found = [Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p)]
    elif name.count("/") > 1 or name.startswith((".", "~", "/")) or name.endswith(SUFFIXES):
        raise DataError(f"--dataset {name}: there is no such file or folder")
    else:
        return None
    files = sorted(p for p in found if p.name.endswith(SUFFIXES))
    if not files:
        raise DataError(
            f"--dataset {name}: holds none of {', '.join(SUFFIXES)}; convert the text to parquet "
            "or jsonl (dataset scripts are never run)"
        )
    return files


def _read(file: Path, column: str) -> Iterator[Record]:
    if file.name.endswith((".txt", ".txt.gz")):
        return _read_txt(file)
    if file.name.endswith(".parquet"):
        return _read_parquet(file, column)
    return _read_jsonl(file, column)


def _open(file: Path) -> BinaryIO:
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")


def _read_txt(file: Path) -> Iterator[Record]:
    """One record. A damaged file is one bad record, with nothing of it used."""
    data = b""
    try:
        with _open(file) as f:
            data = f.read()
        yield f"{file}:1", data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        yield f"{file}:{line}", error
    except (OSError, EOFError, zlib.error) as error:
        yield f"{file}:1", error


def _read_jsonl(file: Path, column: str) -> Iterator[Record]:
    """One record a line; lines of white space are none. What precedes a damage is still yielded."""
    number = 0
    try:
        with _open(file) as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    yield f"{file}:{number}", _json_text(line, column)
    except (OSError, EOFError, zlib.error) as error:
        yield f"{file}:{number + 1}", error


def _json_text(line: bytes, column: str) -> object:
    try:
        record = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
    except (ValueError, RecursionError) as error:
        return error
    if not isinstance(record, dict):
        return ValueError("not a JSON object")
    return record[column] if column in record else _no_column(column, record)


def _no_column(column: str, known: Iterable[str]) -> ValueError:
    names = ", ".join(map(repr, known)) or "none"
    return ValueError(f"no field {column!r} (--text-column; fields: {names})")


def _read_parquet(file: Path, column: str) -> Iterator[Record]:
    """One record a row, counted from 1."""
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        with parquet.ParquetFile(file) as f:
            if column not in f.schema_arrow.names:
                yield f"{file}:row 1", _no_column(column, f.schema_arrow.names)
                return
            for batch in f.iter_batches(1024, columns=[column]):
                yield from _arrow_records(str(file), row, batch.column(0))
                row += len(batch)
    except (OSError, pyarrow.ArrowException) as error:
        yield f"{file}:row {row + 1}", OSError(one_line(error))


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
    if name in ("arrow", "csv", "json", "pandas", "parquet", "text", "xml"):
        # The library would take these for the files of the current folder.
        raise DataError(f"--dataset {name}: is a file format; name a parquet, jsonl or txt file")
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
    """Why a record cannot be used; None if it can."""
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
