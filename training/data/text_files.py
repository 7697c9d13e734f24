"""Which files a ``--dataset`` stands for. Torch-free; reads no file."""

import fnmatch
import glob
import importlib.util
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from common.errors import ConfigError
from common.text import printable
from training.config.schema import DataSection, flag

SUFFIXES = (".txt", ".txt.gz", ".txt.zst", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
# Words in the names of files and folders, as the library ``datasets`` understands them.
SPLIT_WORDS = (
    dict.fromkeys(("train", "training"), "train")
    | dict.fromkeys(("validation", "valid", "dev", "val"), "validation")
    | dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
)
# A file of the hub may have a split of its own kind, such as train_sft-00000-of-00002.parquet.
SHARD = re.compile(r"(\w+)-\d{5}-of-\d{5}")
SEPARATORS = re.compile(r"[-._ =0-9]+")
# First or last words of names of .txt files that accompany a corpus and hold no text of it.
DOCUMENTATION = {"authors", "changelog", "citation", "contributing", "contributors", "copying"}
DOCUMENTATION |= {"copyright", "licence", "licences", "license", "licenses", "notice", "readme"}
DOCUMENTATION |= {"requirements", "unlicense"}
LISTED_KINDS = 8


class DataError(ConfigError):
    """Bad data; the message is one line naming file and line (or the flag) and the fix."""


def suffix_of(name: str) -> str | None:
    """The suffix that decides how a file is read; None if files of this name are not read."""
    return next((s for s in reversed(SUFFIXES) if name.lower().endswith(s)), None)


def split_of(parts: tuple[str, ...]) -> str | None:
    """The split that the names of folders and a file (the last part) mention, if they do."""
    shard = SHARD.match(parts[-1])
    if shard and shard[1].lower() not in SPLIT_WORDS and _split_word(shard[1]):
        return shard[1]
    return next(filter(None, map(_split_word, parts)), None)


def _split_word(name: str) -> str | None:
    words = SEPARATORS.split(name.lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _is_documentation(name: str) -> bool:
    suffix = suffix_of(name)
    if suffix is None or not suffix.startswith(".txt"):
        return False
    words = [word for word in SEPARATORS.split(name[: -len(suffix)].lower()) if word]
    return bool(words) and (words[0] in DOCUMENTATION or words[-1] in DOCUMENTATION)


class _Collection:
    """The files that a name stands for, each real file once, and those that are not used."""

    def __init__(self):
        self.unused: dict[str, list[Path]] = defaultdict(list)
        self._files: list[tuple[bool, tuple[str, ...], Path, tuple | None]] = []
        self._collected_folders: set[str] = set()

    def add_folder(self, folder: Path) -> None:
        """Take the files below a folder that are not hidden; links are followed."""
        for inner, linked, entries in self._folders(folder, self._collected_folders):
            for entry in entries:
                path = inner / entry.name
                if _is_hidden(entry.name):
                    self.unused["hidden"].append(path)
                elif not entry.is_dir():
                    self.add_file(path, linked)

    def add_file(self, path: Path, linked: bool = False, *, spelled: bool = False) -> None:
        """Take a file of a kind that is read; ``spelled``: even one named like documentation."""
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            return self.unused["special"].append(path)
        if suffix_of(path.name) is None:
            return self.unused[_kind(path.name)].append(path)
        if _is_documentation(path.name) and not spelled:
            return self.unused["documentation"].append(path)
        inode = (info.st_dev, info.st_ino) if info.st_nlink > 1 else None
        self._files.append((linked or path.is_symlink(), path.parts, path, inode))

    def add_matches(self, base: Path, pattern: list[str]) -> None:
        """Take what a glob stands for below ``base``, files and folders alike.

        A wildcard at the start of a name does not match a hidden name, nor documentation.
        """
        part, *rest = pattern
        if part == "**":
            for folder, _, _ in self._folders(base, set()):
                if rest:
                    self.add_matches(folder, rest)
                else:
                    self.add_folder(folder)
            return
        spelled = part[0] not in "*?["
        if not glob.has_magic(part):
            names = [part] if _exists(base / part) else []
        else:
            names = [name for name in os.listdir(base) if fnmatch.fnmatchcase(name, part)]
        paths = [base / name for name in names]
        for path in sorted(paths, key=lambda path: (path.is_symlink(), path.name)):
            if _is_hidden(path.name) and not spelled:
                self.unused["hidden"].append(path)
            elif stat.S_ISDIR(path.stat().st_mode):
                if rest:
                    self.add_matches(path, rest)
                else:
                    self.add_folder(path)
            elif not rest:
                self.add_file(path, spelled=spelled)

    def files(self) -> list[Path]:
        """The files that are used, in the order of their names, each text once.

        A real file is preferred to links to it, and an unpacked file to its packed copy.
        """
        ordered, first = sorted(self._files), {}
        linked = bool(ordered) and ordered[-1][0]
        for _, _, path, inode in ordered:
            # Without links each path is a file of its own, and no path needs to be resolved.
            same = inode or (os.path.realpath(path) if linked else path)
            if first.setdefault(same, path) != path:
                self.unused["reached twice"].append(path)
        unpacked: dict[Path, Path] = {}
        for path in sorted(first.values(), key=lambda path: path.parts):
            packed = path.suffix.lower() in (".gz", ".zst")
            if unpacked.setdefault(path.with_suffix("") if packed else path, path) != path:
                self.unused["packed copies"].append(path)
        for kind, paths in self.unused.items():
            self.unused[kind] = sorted(set(paths), key=lambda path: path.parts)
        return [*unpacked.values()]

    def _folders(self, folder: Path, visited: set[str]) -> Iterator[tuple[Path, bool, list]]:
        """A folder and the folders below it, each real one once, with their entries.

        Links come last, so that no link takes the place of a real folder.
        """
        real, links = [folder], []
        while real or links:
            linked = not real
            inner = (real or links).pop()
            place = os.path.realpath(inner)
            if place in visited:
                continue
            visited.add(place)
            with os.scandir(inner) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
            below = [e for e in entries if not _is_hidden(e.name) and e.is_dir()]
            for entry in reversed(below):
                (links if entry.is_symlink() or linked else real).append(inner / entry.name)
            yield inner, linked, entries


def _kind(name: str) -> str:
    """The suffix that says what an unused file is."""
    suffixes = Path(name).suffixes
    packed = suffixes and suffixes[-1] in (".gz", ".zst", ".xz", ".bz2", ".zip")
    return "".join(suffixes[-2 if packed else -1 :]) or "without suffix"


def _count(kinds: dict[str, list[Path]]) -> str:
    """``40 .jsonl.zst, 1 .txt (notes.txt)``: the largest kinds first."""
    ordered = sorted(kinds.items(), key=lambda kind: (-len(kind[1]), kind[0]))
    texts = [
        f"{len(paths)} {kind}" + (f" ({paths[0].name})" if len(paths) == 1 else "")
        for kind, paths in ordered[:LISTED_KINDS]
    ]
    if others := sum(len(paths) for _, paths in ordered[LISTED_KINDS:]):
        texts.append(f"{others} others")
    return printable(", ".join(texts))


def _of_split(section: DataSection, root: Path, files: list[Path], unused: dict) -> list[Path]:
    """The files of ``--dataset-split``; one whose name speaks of no split belongs to train."""
    named = [split_of(path.relative_to(root).parts) for path in files]
    if not any(named):
        source = "files whose names speak of no split"
        _refuse_without_effect(section, source, "dataset_split")
        return files
    splits: dict[str, list[Path]] = defaultdict(list)
    for path, split in zip(files, named, strict=True):
        splits[split or "train"].append(path)
    wanted = SPLIT_WORDS.get(section.dataset_split.lower(), section.dataset_split)
    if wanted not in splits:
        raise DataError(
            f"--dataset-split {section.dataset_split}: no file of --dataset "
            f"{section.dataset} is of that split: there are {_count(splits)}; "
            "choose one of these"
        )
    used = splits.pop(wanted)
    unused.update({f"of split {split}": others for split, others in splits.items()})
    return used


def _refuse_mixture(section: DataSection, files: list[Path]) -> None:
    """Refuse text beside records: it may be a document, or a note on the records.

    Raises:
        DataError: naming one of each.
    """
    beside: dict[tuple[Path, bool], Path] = {}
    for path in files:
        text = suffix_of(path.name).startswith(".txt")
        beside[path.parent, text] = path
        if other := beside.get((path.parent, not text)):
            note, records = (path, other) if text else (other, path)
            raise DataError(
                f"--dataset {section.dataset}: {note.name} stands beside "
                f"{records.name}: name what is meant with a glob, such as "
                f"'{records.parent}/*{suffix_of(records.name)}' (or * for both)"
            )


def _exists(path: Path) -> bool:
    """Whether there is something, if only a link to nothing; other errors are raised."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _refuse_without_effect(section: DataSection, source: str, *keys: str) -> None:
    for key in keys:
        value = getattr(section, key)
        if value != DataSection.model_fields[key].default:
            raise DataError(f"{flag(key)} {value} has no effect with {source}: leave it out")


def check_source(section: DataSection) -> tuple[list[Path], str] | None:
    """Check, without the network, that there is such a source and that each flag has an effect.

    Returns:
        As :func:`local_files`; None also for a source that is built in.

    Raises:
        DataError: if there is no such source, or a flag has no effect.
    """
    name = section.dataset
    if name in ("stdlib", "synthetic"):
        keys = ("dataset_config", "dataset_split", "text_column")
        return _refuse_without_effect(section, f"--dataset {name}", *keys)
    files = local_files(section)
    if files is None:
        # datasets takes such a name for a file format, and reads the current folder.
        package = importlib.util.find_spec("datasets").submodule_search_locations[0]
        if name.strip("/") in os.listdir(Path(package) / "packaged_modules"):
            raise DataError(
                f"--dataset {name}: is a file format; name a parquet, jsonl or txt file"
            )
    return files


def local_files(section: DataSection) -> tuple[list[Path], str] | None:
    """The files that a path, folder or glob stands for, sorted, and a line that counts them.

    The line is empty for a single file. None if the name can only be one of the hub.

    Raises:
        DataError: if there are no files of the split, for a file that cannot be found or opened,
            and for a flag that has no effect on the files.
    """
    name = section.dataset
    try:
        files = _local_files(section, Path(name).expanduser())
    except OSError as error:
        path, why = os.fsdecode(error.filename or name), error.strerror
        if os.path.islink(path) and isinstance(error, FileNotFoundError):
            why = "a link to something that does not exist"
        raise DataError(
            f"--dataset {name}: {path} cannot be read ({why}): "
            "mend or remove it, or name the files that are meant with a glob"
        ) from None
    except (RuntimeError, ValueError) as error:  # no such home directory; a zero byte
        raise DataError(f"--dataset {name}: {error}") from None
    if files is not None:
        _refuse_without_effect(section, "local files", "dataset_config")
        if all(suffix_of(path.name).startswith(".txt") for path in files[0]):
            _refuse_without_effect(section, ".txt files, which have no fields", "text_column")
    return files


def _local_files(section: DataSection, path: Path) -> tuple[list[Path], str] | None:
    name, collection = section.dataset, _Collection()
    if not name.strip():
        raise DataError("--dataset is empty: name a file, a folder, a dataset, or stdlib")
    root = path
    if _exists(path):
        if path.is_dir():
            collection.add_folder(path)
        else:
            root = None
            collection.add_file(path, spelled=True)
            _refuse_without_effect(section, "a single file", "dataset_split")
    elif glob.has_magic(name):
        first = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
        root = Path(*path.parts[:first])
        if _exists(root):
            collection.add_matches(root, list(path.parts[first:]))
    elif name.count("/") > 1 or name.startswith((".", "~", "/")) or suffix_of(name):
        raise DataError(f"--dataset {name}: there is no such file or folder")
    else:
        return None
    files, unused = collection.files(), collection.unused
    if not files:
        there = f" (not used: {_count(unused)})" if unused else ""
        raise DataError(
            f"--dataset {name}: holds none of {', '.join(SUFFIXES)}{there}; convert the "
            "text to parquet or jsonl (dataset scripts are never run)"
        )
    if root is None:
        return files, ""
    files = _of_split(section, root, files, unused)
    if root == path:
        _refuse_mixture(section, files)
    used: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        used[suffix_of(file.name)].append(file)
    line = f"data: {printable(name)}: used {_count(used)}"
    return files, f"{line}; not used: {_count(unused)}" if unused else line
