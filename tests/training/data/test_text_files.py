"""Which files a folder or a glob stands for, what is said of them, and flags without effect."""

import json
import os

import pytest
import zstandard

from common.errors import ConfigError
from tests.training.data.test_batches import build, record, texts, write_jsonl
from training.config.schema import DataSection
from training.data import text_files
from training.data.text_files import DataError, check_source, split_of


def write(root, *names):
    """Files whose one document is their name."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = name if ".txt" in name else record(name)
        packed = zstandard.compress(content.encode())
        path.write_bytes(packed if name.endswith(".zst") else content.encode())


def chosen(dataset, **section):
    """The names of the files, and what is said after the name of the dataset."""
    files, line = check_source(DataSection(dataset=str(dataset), **section))
    return [file.name for file in files], line.removeprefix(f"data: {dataset}: ")


def test_links_are_followed_and_each_file_counts_once(tmp_path):
    root = tmp_path / ".hidden" / "corpus"  # what is named may be hidden
    write(tmp_path, "elsewhere/c.jsonl", "elsewhere/deep/d.jsonl")
    write(root, "a.jsonl", "sub/b.jsonl")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "again").symlink_to("sub")
    (root / "sub" / "cycle").symlink_to(root)
    (root / "0.jsonl").symlink_to("sub/b.jsonl")
    (root / "hard.jsonl").hardlink_to(root / "a.jsonl")
    (root / "named").symlink_to(root)
    train, _, _ = build(root, tmp_path)
    assert texts(train) == ["a.jsonl", "elsewhere/c.jsonl", "elsewhere/deep/d.jsonl", "sub/b.jsonl"]
    said = "used 4 .jsonl; not used: 2 reached twice"
    assert chosen(root) == (["a.jsonl", "c.jsonl", "d.jsonl", "b.jsonl"], said)
    for glob in ("**", "**/*.jsonl", "**/**/*", "*", "[!x]*"):
        assert sorted(chosen(root / glob)[0]) == ["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"]
    assert chosen(root / "named") == (chosen(root)[0], said)


def test_hidden_files_count_only_where_a_glob_spells_them(tmp_path):
    write(tmp_path, "a.jsonl", ".b.jsonl", "_c.jsonl", ".ipynb_checkpoints/a.jsonl", "_t/d.jsonl")
    assert chosen(tmp_path) == (["a.jsonl"], "used 1 .jsonl (a.jsonl); not used: 4 hidden")
    assert chosen(tmp_path / "*.jsonl")[0] == ["a.jsonl"]
    assert chosen(tmp_path / "**/a.jsonl")[0] == ["a.jsonl"]
    assert chosen(tmp_path / ".*")[0] == [".b.jsonl", "a.jsonl"]
    assert chosen(tmp_path / "_*/*")[0] == chosen(tmp_path / "_t")[0] == ["d.jsonl"]


def test_what_is_not_used_is_listed_by_suffix(tmp_path):
    write(tmp_path, "1.jsonl.zst", "2.jsonl.zst", "3.jsonl", "3.jsonl.zst", "LICENSE.txt", "a.md")
    write(tmp_path, "requirements-dev.txt", "b.md", "c.tar.gz", "Makefile", "UP.JSONL", "\033[1m.c")
    os.mkfifo(tmp_path / "pipe.jsonl")
    lines = []
    train, _, _ = build(tmp_path, tmp_path, log=lines.append)
    assert texts(train) == ["1.jsonl.zst", "2.jsonl.zst", "3.jsonl", "UP.JSONL"]
    said = (
        f"data: {tmp_path}: used 2 .jsonl, 2 .jsonl.zst; not used: 2 .md, 2 documentation, "
        "1 .c (\\x1b[1m.c), 1 .tar.gz (c.tar.gz), 1 packed copies (3.jsonl.zst), "
        "1 special (pipe.jsonl), 1 without suffix (Makefile)"
    )
    assert lines[0] == said and len(lines) == 3
    assert chosen(tmp_path / "LIC*")[0] == ["LICENSE.txt"]
    assert chosen(tmp_path / "*.zst")[0] == ["1.jsonl.zst", "2.jsonl.zst", "3.jsonl.zst"]
    with pytest.raises(DataError, match=r"holds none of .*\(not used: 2 documentation\)"):
        check_source(DataSection(dataset=str(tmp_path / "*.txt")))


def test_text_beside_records_is_refused_unless_a_glob_names_it(tmp_path):
    write(tmp_path, "1.jsonl", "notes.txt", "books/b.txt", "web/w.jsonl")
    with pytest.raises(DataError, match=r"notes.txt stands beside 1.jsonl: .* glob.*/\*\.jsonl'"):
        check_source(DataSection(dataset=str(tmp_path)))
    assert chosen(tmp_path / "*.jsonl")[0] == ["1.jsonl"]
    assert len(chosen(tmp_path / "*")[0]) == 4
    (tmp_path / "notes.txt").unlink()
    assert chosen(tmp_path) == (["1.jsonl", "b.txt", "w.jsonl"], "used 2 .jsonl, 1 .txt (b.txt)")


HUB = [f"{s}-0000{i}-of-00002.jsonl" for s in ("train", "validation", "test") for i in (0, 1)]
SPLITS = {
    # names of files, --dataset-split, and those used or the error
    "hub": (HUB, "train", HUB[:2]),
    "alias": (HUB, "dev", HUB[2:4]),
    "folder data": ([f"data/{name}" for name in HUB], "test", HUB[4:]),
    "none such": (HUB, "extra", "no file .*: there are 2 test, 2 train, 2 validation"),
    "slice": (HUB, "train[:10%]", r"train\[:10%\]: no file"),
    "folders": (["train/a.jsonl", "valid/b.jsonl", "split=test/c.jsonl"], "val", ["b.jsonl"]),
    "words": (["c4-train.00.jsonl", "w.dev.jsonl", "test_1.jsonl"], "train", ["c4-train.00.jsonl"]),
    "only test": (["test.jsonl", "eval-0.jsonl"], "train", r"train: no file .*there are 2 test"),
    "some unnamed": (["a.jsonl", "train.jsonl", "test.jsonl"], "train", ["a.jsonl", "train.jsonl"]),
    "unnamed": (["contest.jsonl", "latest.jsonl"], "train", ["contest.jsonl", "latest.jsonl"]),
    "no effect": (["a.jsonl", "b.jsonl"], "test", "test has no effect with files whose names"),
    "own split": (
        ["train_sft-00000-of-00001.jsonl", "a.jsonl"],
        "train_sft",
        ["train_sft-00000-of-00001.jsonl"],
    ),
    "not chosen": (["train_sft-00000-of-00001.jsonl"], "train", r"there are 1 train_sft \("),
}


@pytest.mark.parametrize("glob", ["", "**/*.jsonl"])
@pytest.mark.parametrize("case", SPLITS)
def test_splits_by_name(tmp_path, case, glob):
    names, split, expected = SPLITS[case]
    root = tmp_path / "test"  # the path of what is named speaks of no split
    write(root, *names)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=f"--dataset-split .*{expected}"):
            chosen(root / glob, dataset_split=split)
    else:
        assert chosen(root / glob, dataset_split=split)[0] == expected


def test_words_of_splits_are_those_of_the_library():
    from datasets.data_files import SPLIT_KEYWORDS

    theirs = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}
    assert theirs == text_files.SPLIT_WORDS
    assert split_of(("Dev", "train.jsonl")) == "validation" and split_of(("devs", "x")) is None


@pytest.mark.parametrize(
    "dataset, key, value",
    [
        ("stdlib", "dataset_split", "test"),
        ("synthetic", "dataset_config", "en"),
        ("synthetic", "text_column", "body"),
        ("{}/a.jsonl", "dataset_split", "validation"),
        ("{}", "dataset_config", "en"),
        ("{}/texts", "text_column", "body"),
    ],
)
def test_flag_without_effect_is_refused(tmp_path, dataset, key, value):
    write(tmp_path, "a.jsonl", "texts/a.txt")
    flag = f"--{key.replace('_', '-')} {value} has no effect with .*: leave it out"
    with pytest.raises(DataError, match=flag):
        check_source(DataSection(dataset=dataset.format(tmp_path), **{key: value}))


def test_what_cannot_be_looked_at_is_an_error(tmp_path, monkeypatch):
    write(tmp_path, "a.jsonl", "sub/b.jsonl")
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    for name in ("", "*", "**/*.jsonl", "gone.jsonl", "gone*/x.jsonl"):
        with pytest.raises(DataError, match=r"gone.jsonl cannot be read \(a link to something"):
            check_source(DataSection(dataset=f"{tmp_path}/{name}"))
    (tmp_path / "gone.jsonl").unlink()
    (tmp_path / "self").symlink_to("self")
    with pytest.raises(DataError, match=r"self cannot be read .*symbolic links"):
        check_source(DataSection(dataset=str(tmp_path)))
    (tmp_path / "self").unlink()

    def scandir(path, real=os.scandir):
        if path.name == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(text_files.os, "scandir", scandir)
    for name in ("", "**/*.jsonl"):
        with pytest.raises(DataError, match=r"sub cannot be read \(Permission denied\)"):
            check_source(DataSection(dataset=f"{tmp_path}/{name}"))


@pytest.mark.parametrize(
    "name, reason",
    [
        ("", "must not be empty"),
        (" ", "is empty"),
        ("~nobody-of-this-name/x", "home directory"),
        ("a\0b.txt", "must not hold a NUL character"),
        ("x" * 300, "a name of 300 bytes"),
        ("/dev/zero", r"holds none of .*not used: 1 special \(zero\)"),
    ],
)
def test_odd_names_are_one_line(name, reason):
    with pytest.raises(ConfigError, match=f"--dataset .*{reason}") as caught:
        check_source(DataSection(dataset=name))
    assert "\n" not in str(caught.value)


def test_file_formats_of_the_library_are_refused():
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    for name in {*_PACKAGED_DATASETS_MODULES, "imagefolder", "webdataset", "imagefolder/"}:
        with pytest.raises(DataError, match=f"--dataset {name}: is a file format; name a parquet"):
            check_source(DataSection(dataset=name))


# ---------------------------------------------------------------------------------------- zstandard


def test_zstandard_frames_are_read_whole(tmp_path):
    lines = [record(str(number)) for number in range(3000)]
    frames = [zstandard.compress("".join(part).encode()) for part in (lines[:2000], lines[2000:])]
    skipped = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"  # as pzstd writes
    file = write_jsonl(tmp_path / "x.jsonl.zst", skipped, frames[0], skipped, frames[1])
    assert texts(build(file, tmp_path)[0]) == [json.loads(line)["text"] for line in lines]


@pytest.mark.parametrize("damage", ["cut", "cut by a byte", "second frame", "bits", "empty"])
def test_damaged_zstandard_is_a_bad_record(tmp_path, damage):
    lines = [record(os.urandom(50).hex()) for _ in range(3000)]
    whole = zstandard.ZstdCompressor(write_checksum=True).compress("".join(lines).encode())
    middle = len(whole) // 2
    file = write_jsonl(tmp_path / "x.jsonl.zst", whole)
    assert len(texts(build(file, tmp_path)[0])) == 3000
    damaged = {
        "cut": whole[:middle],
        "cut by a byte": whole[:-1],
        "second frame": whole + b"no frame",
        "bits": whole[:middle] + bytes([whole[middle] ^ 8]) + whole[middle + 1 :],
        "empty": b"",
    }
    file.write_bytes(damaged[damage])
    with pytest.raises(DataError, match=r"x.jsonl.zst:\d+: (cannot be read|Expecting|not a|Ext)"):
        build(file, tmp_path)
    if damage == "cut":
        train, _, meta = build(file, tmp_path, skip_bad_records=True)
        assert 0 < meta["documents"] < 2000 and meta["skipped_records"] == 1
        kept = [json.loads(line)["text"] for line in lines[: meta["documents"]]]
        assert texts(train) == kept
