"""Text to batches: bad records, tokenizers, the cache, and what each rank reads."""

import contextlib
import dataclasses
import gzip
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest
import torch

from training.config.schema import DataSection
from training.data import sources as text_module
from training.data import token_cache
from training.data import tokenizer as tokenizer_module
from training.data import tokens as tokens_module
from training.data.batches import (
    IGNORE_INDEX,
    Sequences,
    eval_batches,
    open_tokens,
    prefetch,
    sample_indices,
    train_batch,
)
from training.data.sources import DataError
from training.data.tokenizer import load_tokenizer
from training.data.tokens import prepare_tokens

BYTES = load_tokenizer("bytes")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test may reach, or wait for, the hub."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def build(dataset, tmp_path, tokenizer=BYTES, log=None, **section):
    """(train ids, eval ids, meta) of a corpus."""
    section = DataSection(dataset=str(dataset), **{"eval_fraction": 0, **section})
    folder = prepare_tokens(section, tokenizer, tmp_path / "cache", log or (lambda line: None))
    meta = json.loads((folder / "meta.json").read_text())
    parts = [np.fromfile(folder / f"{part}.bin", meta["dtype"]) for part in ("train", "eval")]
    return *[part.tolist() for part in parts], meta


def texts(ids, tokenizer=BYTES):
    """The documents of an id list; every one of them must be closed by EOS."""
    assert not ids or ids[-1] == tokenizer.eos_id
    ends = [i for i, token in enumerate(ids) if token == tokenizer.eos_id]
    starts = [0, *[end + 1 for end in ends]]
    return [tokenizer.decode(ids[a:b]) for a, b in zip(starts, ends, strict=False)]


def write_jsonl(path, *lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def write_parquet(path, **columns):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path


def record(text):
    return json.dumps({"text": text}) + "\n"


# ---------------------------------------------------------------------------------------- tokenizer


def save_tokenizer(folder, bos_template=False, eos=True, added=(), truncation=0):
    """A local word tokenizer: a..z are 0..25, then <unk>, <s>, </s>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {chr(97 + i): i for i in range(26)} | {"<unk>": 26, "<s>": 27, "</s>": 28}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_tokens(list(added))
    if bos_template:
        backend.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", 27)]
        )
    if truncation:
        backend.enable_truncation(truncation)
        backend.enable_padding(pad_id=26, pad_token="<unk>", length=truncation)
    special = {"bos_token": "<s>", "unk_token": "<unk>"} | ({"eos_token": "</s>"} if eos else {})
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    return str(folder)


def test_byte_tokenizer_is_the_identity_on_bytes():
    text = "".join(map(chr, range(300))) + "naïve <|endoftext|> 日本\r\n\t  x"
    ids = BYTES.encode([text, "a"])
    assert ids == [list(text.encode()), [97]]
    assert BYTES.decode(ids[0]) == text
    assert (BYTES.vocab_size, BYTES.eos_id, BYTES.name) == (257, 256, "bytes")
    assert load_tokenizer("bytes").fingerprint == BYTES.fingerprint


@pytest.mark.parametrize("bos_template", [False, True])
def test_documents_get_no_bos_and_one_eos(tmp_path, bos_template):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "tok", bos_template))
    file = write_jsonl(tmp_path / "x.jsonl", record("a b"), record("c"))
    train, _, meta = build(file, tmp_path, tokenizer)
    assert train == [0, 1, 28, 2, 28]
    assert meta["documents"] == 2


def test_saved_truncation_and_padding_are_off(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "tok", truncation=3))
    assert tokenizer.encode(["a b c d e", "f"]) == [[0, 1, 2, 3, 4], [5]]


def test_vocab_size_counts_added_tokens(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "tok", added=["<x>", "<y>"]))
    assert tokenizer.vocab_size == 31
    assert tokenizer.encode(["a <y>"]) == [[0, 30]]
    other = load_tokenizer(save_tokenizer(tmp_path / "tok2"))
    assert other.fingerprint != tokenizer.fingerprint


def test_tokenizer_without_eos_is_refused(tmp_path):
    folder = save_tokenizer(tmp_path / "tok", eos=False)
    with pytest.raises(DataError, match=r'no EOS token.*"eos_token" in its tokenizer_config.json'):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["/no/such/folder", "no-such-org/no-such-tokenizer"])
def test_unknown_tokenizer_is_one_line(name):
    with pytest.raises(DataError, match=f"--tokenizer {name}: cannot be loaded") as caught:
        load_tokenizer(name)
    assert "\n" not in str(caught.value)


def test_tokenizer_code_never_runs(tmp_path):
    folder, marker = tmp_path / "tok", tmp_path / "marker"
    save_tokenizer(folder)
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with contextlib.suppress(DataError):
        load_tokenizer(str(folder))
    assert not marker.exists()


# ------------------------------------------------------------------------------------------ sources


BAD_LINES = {
    "malformed": (b'{"text": "x"\n', r"delimiter"),
    "utf8": (b'{"text": "\xff"}\n', r"utf-8.*0xff"),
    "surrogate": (b'{"text": "\\ud800"}\n', r"lone surrogate"),
    "missing": (b'{"body": "x"}\n', r"no field 'text' \(--text-column; fields: 'body'\)"),
    "null": (b'{"text": null}\n', r"the text is null"),
    "number": (b'{"text": 7}\n', r"the text is int, not a string"),
    "list": (b'["x"]\n', r"not a JSON object"),
    "empty": (b'{"text": ""}\n', r"the text is blank"),
    "blank": (b'{"text": " \\n\\t"}\n', r"the text is blank"),
    "deep": (b'{"text": ' + b"[" * 100_000 + b"\n", r"recursion"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_bad_line_stops_or_is_skipped(tmp_path, kind):
    line, reason = BAD_LINES[kind]
    file = write_jsonl(tmp_path / "x.jsonl", record("one"), line, "\n", record("two"))
    with pytest.raises(DataError, match=f"x.jsonl:2: .*{reason}.*; fix it or pass --skip-bad"):
        build(file, tmp_path)
    train, _, meta = build(file, tmp_path, skip_bad_records=True)
    assert texts(train) == ["one", "two"]
    assert (meta["documents"], meta["skipped_records"]) == (2, 1)


def test_truncated_gzip_keeps_the_lines_before(tmp_path):
    lines = [record(f"{i} {np.random.default_rng(i).bytes(60).hex()}") for i in range(2000)]
    whole = gzip.compress("".join(lines).encode())
    file = tmp_path / "x.jsonl.gz"
    file.write_bytes(whole)
    assert build(file, tmp_path)[2]["documents"] == 2000
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"x.jsonl.gz:\d{3,4}: cannot be read \(.*end-of-stream"):
        build(file, tmp_path)
    train, _, meta = build(file, tmp_path, skip_bad_records=True)
    assert 900 < meta["documents"] < 1100 and meta["skipped_records"] == 1
    assert texts(train) == [json.loads(line)["text"] for line in lines[: meta["documents"]]]


def test_text_files(tmp_path):
    folder = tmp_path / "corpus" / "sub"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n")
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"two"))
    (folder / "notes.md").write_text("not read")
    write_jsonl(folder.parent / "z.jsonl", record("three"))
    assert texts(build(folder.parent, tmp_path)[0]) == ["one\r\n", "two", "three"]
    assert texts(build(f"{folder.parent}/**/*.gz", tmp_path)[0]) == ["two"]

    (folder / "c.txt").write_bytes(b"line\nline \xff")
    with pytest.raises(DataError, match=r"c.txt:2: .*0xff"):
        build(folder.parent, tmp_path)
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"two" * 1000)[:-12])
    with pytest.raises(DataError, match=r"b.txt.gz:1: cannot be read"):
        build(folder / "b.txt.gz", tmp_path)
    train, _, meta = build(folder.parent, tmp_path, skip_bad_records=True)
    assert texts(train) == ["one\r\n", "three"] and meta["skipped_records"] == 2


def test_parquet(tmp_path):
    file = write_parquet(tmp_path / "x.parquet", body=["one", None, "two", " "], other=[1, 2, 3, 4])
    with pytest.raises(DataError, match=r"x.parquet:row 2: the text is null"):
        build(file, tmp_path, text_column="body")
    train, _, meta = build(file, tmp_path, text_column="body", skip_bad_records=True)
    assert texts(train) == ["one", "two"] and meta["skipped_records"] == 2
    with pytest.raises(
        DataError, match=r"no field 'text' \(--text-column; fields: 'body', 'other'"
    ):
        build(file, tmp_path)


def test_cut_parquet(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_parquet(folder / "a.parquet", text=["one"])
    file = write_parquet(folder / "b.parquet", text=[str(i) for i in range(1000)])
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(DataError, match=r"b.parquet:row 1: cannot be read") as caught:
        build(folder, tmp_path)
    assert "\n" not in str(caught.value)
    train, _, meta = build(folder, tmp_path, skip_bad_records=True)
    assert texts(train) == ["one"] and meta["skipped_records"] == 1


def test_invalid_utf8_in_parquet_names_the_row(tmp_path):
    import pyarrow

    column = pyarrow.array([b"one", b"\xff", b"two"]).view(pyarrow.string())
    file = write_parquet(tmp_path / "x.parquet", text=column)
    with pytest.raises(DataError, match=r"x.parquet:row 2: .*0xff"):
        build(file, tmp_path)
    assert texts(build(file, tmp_path, skip_bad_records=True)[0]) == ["one", "two"]


@pytest.mark.parametrize("bos_template", [False, True])
def test_only_blank_rows_is_an_error(tmp_path, bos_template):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "tok", bos_template))
    file = write_jsonl(
        tmp_path / "x.jsonl", record(""), record(" \n"), b'{"text": null}\n', b"{}\n"
    )
    with pytest.raises(DataError, match=r"no usable text \(4 bad records\)"):
        build(file, tmp_path, tokenizer, skip_bad_records=True)
    write_jsonl(file, "")
    with pytest.raises(DataError, match=r"no usable text \(0 bad records\)"):
        build(file, tmp_path, tokenizer)
    assert not list((tmp_path / "cache").glob("*/meta.json"))


def test_text_without_tokens_leaves_no_lone_eos(tmp_path):
    from tokenizers import Regex, normalizers

    tokenizer = load_tokenizer("bytes")
    tokenizer.backend.normalizer = normalizers.Replace(Regex("x"), "")
    file = write_jsonl(tmp_path / "x.jsonl", record("ax"), record("xx"), record("b"))
    train, _, meta = build(file, tmp_path, tokenizer)
    assert train == [97, 256, 98, 256]
    assert (meta["documents"], meta["skipped_records"]) == (2, 1)


def test_very_long_document_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_module, "WINDOW_CHARS", 40)
    monkeypatch.setattr(tokenizer_module, "WINDOW_CHARS", 40)
    monkeypatch.setattr(tokenizer_module, "OVERLAP_CHARS", 16)
    monkeypatch.setattr(tokens_module, "BATCH_DOCUMENTS", 3)
    long = ["aé\nb" * 20, "x" * 57, "short", "c" * 10, "d\n" * 11, "y"]
    file = write_jsonl(tmp_path / "x.jsonl", *map(record, long))
    train, _, meta = build(file, tmp_path)
    assert texts(train) == long and meta["documents"] == 6


def test_nothing_found(tmp_path):
    marker = tmp_path / "marker"
    script = tmp_path / "script"
    script.mkdir()
    (script / "script.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(DataError, match=r"holds none of .txt.*parquet or jsonl.*scripts are never"):
        build(script, tmp_path)
    assert not marker.exists()
    (tmp_path / "x.csv").write_text("a,b")
    for name in ("x.csv", "*.parquet"):
        with pytest.raises(DataError, match="holds none of"):
            build(tmp_path / name, tmp_path)
    with pytest.raises(DataError, match="there is no such file or folder"):
        build(tmp_path / "missing", tmp_path)


@pytest.mark.parametrize("name", ["stdlibb", "no-such-org/no-such-set", "json"])
def test_unknown_hub_name_is_one_line(tmp_path, name):
    with pytest.raises(DataError, match=f"--dataset {name}.*parquet.*jsonl") as caught:
        build(name, tmp_path)
    assert "\n" not in str(caught.value)


def test_hub_dataset(tmp_path, monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, config, split, **unwanted):
        assert not unwanted
        asked.append((name, config, split))
        return datasets.Dataset.from_dict({"body": ["one", "", "two"], "n": [1, 2, 3]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = {"dataset_config": "en", "dataset_split": "validation", "text_column": "body"}
    train, _, meta = build("org/set", tmp_path, skip_bad_records=True, **hub)
    assert texts(train) == ["one", "two"] and meta["skipped_records"] == 1
    assert asked == [("org/set", "en", "validation")]
    with pytest.raises(DataError, match="org/set:row 2: the text is blank"):
        build("org/set", tmp_path, **hub)
    with pytest.raises(DataError, match="no field 'text'"):
        build("org/set", tmp_path)


def test_stdlib_source_is_this_interpreters():
    _, records = text_module.open_source(DataSection(dataset="stdlib"))
    where, text = next(record for record in records() if "/argparse.py" in record[0])
    with open(where.rsplit(":", 1)[0]) as file:
        assert file.read() == text
    names = [where for where, _ in records()]
    assert len(names) > 300 and names == sorted(names)
    left_out = ("/site-packages/", "/test/", "/tests/", "/__pycache__/")
    assert not [name for name in names if any(part in name for part in left_out)]


def test_synthetic_source_is_always_the_same(tmp_path):
    lines = []
    train, held_out, meta = build("synthetic", tmp_path, log=lines.append, eval_fraction=0.01)
    assert meta["documents"] == 4096 and 900_000 < len(train) + len(held_out) < 1_300_000
    assert meta["train_sha256"].startswith("656c2da070846abf")
    assert len(lines) == 2 and "tokenising synthetic" in lines[0]
    assert f"4096 documents, {len(train)} train and {len(held_out)} held-out tokens" in lines[1]
    assert "0 records skipped" in lines[1]


# ---------------------------------------------------------------------------------- held-out, cache


def test_held_out_documents_are_chosen_by_content(tmp_path):
    documents = [f"document {i}" for i in range(1000)]
    chosen = {}
    for name, order in {"x": documents, "y": documents[::-1]}.items():
        file = write_jsonl(tmp_path / f"{name}.jsonl", *map(record, order))
        train, held_out, _ = build(file, tmp_path, eval_fraction=0.1)
        chosen[name] = set(texts(held_out))
        assert len(texts(train)) + len(chosen[name]) == 1000
        assert not chosen[name] & set(texts(train))
    assert chosen["x"] == chosen["y"] and 70 < len(chosen["x"]) < 130
    # Another fraction moves documents one way only.
    assert chosen["x"] < set(texts(build(file, tmp_path, eval_fraction=0.2)[1]))


def test_nothing_held_out_is_noticed(tmp_path):
    lines = []
    file = write_jsonl(tmp_path / "x.jsonl", record("some text to train on"))
    build(file, tmp_path, log=lines.append, eval_fraction=1e-6)
    assert lines[-1] == "data: no document is held out with --eval-fraction 1e-06"
    build(file, tmp_path, log=lines.append)
    assert "held out with" not in lines[-1]


def test_cache_is_found_again_and_follows_the_source(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", record("one two three"), record(""))
    section = DataSection(dataset=str(file), eval_fraction=0, skip_bad_records=True)
    lines = []
    first = prepare_tokens(section, BYTES, tmp_path / "cache", lines.append)
    again = prepare_tokens(section, BYTES, tmp_path / "cache", lines.append)
    assert first == again and len(lines) == 3
    assert "from the cache" in lines[2] and "1 records skipped" in lines[2]
    write_jsonl(file, record("one two four!"), record(""))
    os.utime(file, ns=(1, 1))
    other = prepare_tokens(section, BYTES, tmp_path / "cache", lines.append)
    assert other != first
    assert open_tokens(other, 4).content_key != open_tokens(first, 4).content_key
    # The same text elsewhere is the same content.
    copy = write_jsonl(tmp_path / "copy.jsonl", file.read_bytes())
    section = section.model_copy(update={"dataset": str(copy)})
    copied = prepare_tokens(section, BYTES, tmp_path / "cache", lines.append)
    assert copied != other
    assert open_tokens(copied, 4).content_key == open_tokens(other, 4).content_key
    assert open_tokens(copied, 5).content_key != open_tokens(other, 4).content_key


def test_default_cache_dir(monkeypatch, tmp_path):
    monkeypatch.delenv("PARALLEL_RECIPES_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tokens_module.default_cache_dir() == tmp_path / "parallel-recipes"
    monkeypatch.setenv("PARALLEL_RECIPES_CACHE", str(tmp_path / "mine"))
    file = write_jsonl(tmp_path / "x.jsonl", record("text"))
    folder = prepare_tokens(DataSection(dataset=str(file), eval_fraction=0), BYTES, log=lambda _: 0)
    assert folder.parent == tmp_path / "mine"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PARALLEL_RECIPES_CACHE", "~/mine")
    assert tokens_module.default_cache_dir() == tmp_path / "mine"
    monkeypatch.setenv("PARALLEL_RECIPES_CACHE", "~nobody-of-this-name/x")
    with pytest.raises(DataError, match=r"no home directory .* PARALLEL_RECIPES_CACHE to a folder"):
        tokens_module.default_cache_dir()


def test_unwritable_cache_is_one_line(tmp_path):
    (tmp_path / "cache").write_text("a file")
    file = write_jsonl(tmp_path / "x.jsonl", record("text"))
    with pytest.raises(DataError, match="PARALLEL_RECIPES_CACHE to another folder"):
        build(file, tmp_path)


def _build_slowly(file, cache, begun, results, pause):
    """Builder process: tells when its first text is out, and takes its time for the second."""

    def slow(records):
        for count, record in enumerate(records):
            if count == 1:
                begun.set()
                time.sleep(pause)
            yield record

    read = text_module._read_jsonl
    text_module._read_jsonl = lambda *args: slow(read(*args))
    lines = []
    section = DataSection(dataset=str(file), eval_fraction=0)
    folder = prepare_tokens(section, BYTES, cache, lines.append)
    results.put((str(folder), lines))


def _start_builder(file, cache, pause):
    context = multiprocessing.get_context("fork")
    begun, results = context.Event(), context.Queue()
    process = context.Process(target=_build_slowly, args=(file, cache, begun, results, pause))
    process.start()
    return process, begun, results


def test_concurrent_builders_build_once(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", record("one"), record("two"))
    first, begun, first_result = _start_builder(file, tmp_path / "cache", 1.0)
    assert begun.wait(30)
    second, _, second_result = _start_builder(file, tmp_path / "cache", 0)
    folder, lines = first_result.get(timeout=30)
    assert [line.split(":")[1][:11] for line in lines] == [" tokenising", f" {file}"[:11]]
    other, other_lines = second_result.get(timeout=30)
    assert other == folder
    assert "waiting" in other_lines[0] and "from the cache" in other_lines[1]
    assert len(other_lines) == 2
    for process in (first, second):
        process.join(30)
        assert process.exitcode == 0
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()] == [folder.split("/")[-1]]


def test_builders_without_locks_agree(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    file = write_jsonl(tmp_path / "x.jsonl", record("one"), record("two"))
    builders = []
    for pause in (0.8, 0.0):
        builders.append(_start_builder(file, tmp_path / "cache", pause))
        assert builders[-1][1].wait(30)
    folders = set()
    for process, _, result in builders:
        folder, lines = result.get(timeout=30)
        folders.add(folder)
        assert "tokenising" in lines[0]
        process.join(30)
        assert process.exitcode == 0
    assert len(folders) == 1
    assert [str(p) for p in (tmp_path / "cache").iterdir() if p.is_dir()] == [*folders]


def test_killed_builder_leaves_no_half_cache(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", record("one"), record("two"))
    builder, begun, _ = _start_builder(file, tmp_path / "cache", 60)
    assert begun.wait(30)
    os.kill(builder.pid, signal.SIGKILL)
    builder.join(30)
    [left] = [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    assert ".tmp-" in left.name
    train, _, _ = build(file, tmp_path)
    assert texts(train) == ["one", "two"]
    [folder] = [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    assert ".tmp-" not in folder.name


def test_failed_build_leaves_nothing(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", record("one"), b"broken\n")
    with pytest.raises(DataError):
        build(file, tmp_path)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


@pytest.mark.parametrize("name", ["train.bin", "eval.bin", "meta.json"])
def test_damaged_cache_says_to_delete_it(tmp_path, name):
    file = write_jsonl(tmp_path / "x.jsonl", *[record(f"document {i}") for i in range(50)])
    section = DataSection(dataset=str(file), eval_fraction=0.3)
    folder = prepare_tokens(section, BYTES, tmp_path / "cache", lambda line: None)
    assert open_tokens(folder, 8).documents == 50
    size = (folder / name).stat().st_size
    os.truncate(folder / name, size - 2)
    with pytest.raises(DataError, match=f"{folder} is damaged .*: delete the folder"):
        open_tokens(folder, 8)
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{folder} is damaged .*: delete the folder"):
        open_tokens(folder, 8)


def make_cache(tmp_path, name="x", **section):
    """A small corpus, and a function that starts with it: finds its folder, and opens it."""
    file = write_jsonl(tmp_path / f"{name}.jsonl", *[record(f"document {i}") for i in range(300)])
    section = DataSection(dataset=str(file), eval_fraction=0.3, **section)

    def start(log=lambda line: None):
        folder = prepare_tokens(section, BYTES, tmp_path / "cache", log)
        return folder, open_tokens(folder, 8)

    return start


META = {
    "a list": ("{", "[{"),
    "nested": ("{", "[" * 50_000),
    "objects": ('"<u2"', '"|O"'),
    "floats": ('"<u2"', '"<f2"'),
    "negative": ('"documents": 300', '"documents": -1'),
    "text": ('"documents": 300', '"documents": "300"'),
    "bool": ('"documents": 300', '"documents": true'),
    "fraction": ('"documents": 300', '"documents": 300.0'),
    "nan": ('"documents": 300', '"documents": NaN'),
    "infinite": ('"documents": 300', '"documents": 1e400'),
    "long": ('"documents": 300', '"documents": ' + "9" * 5000),
    "unknown key": ('"documents"', '"files"'),
    "digest": ('"train_sha256": "', '"train_sha256": "../'),
    "vocabulary": ('"largest_id": 256', '"largest_id": 257'),
    "tokenizer": (BYTES.fingerprint, "0" * 64),
    "escapes": ('"documents": 300', '"\\u001b[31m": 300'),
}


@pytest.mark.parametrize("kind", META)
def test_meta_is_checked_before_it_is_believed(tmp_path, kind):
    start = make_cache(tmp_path)
    folder, _ = start()
    text = (folder / "meta.json").read_text()
    assert META[kind][0] in text
    (folder / "meta.json").write_text(text.replace(*META[kind], 1))
    with pytest.raises(
        DataError, match=rf"{folder} is damaged \(meta.json: .*: delete the folder"
    ) as e:
        start()
    assert str(e.value).isprintable()


@pytest.mark.parametrize("name", ["train.bin", "eval.bin", "meta.json", ""])
@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "broken link"])
def test_only_regular_files_are_opened(tmp_path, name, kind):
    start = make_cache(tmp_path)
    folder, _ = start()
    path = folder / name
    shutil.move(path, tmp_path / "moved")
    make = {
        "fifo": os.mkfifo,
        "folder": os.mkdir,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "broken link": lambda path: path.symlink_to("nowhere"),
    }
    make[kind](path)
    with pytest.raises(DataError, match=rf"{folder} is damaged \(.*: delete the folder"):
        start()
    (path.rmdir if kind == "folder" else path.unlink)()
    path.symlink_to(tmp_path / "moved")  # to another disk, where there is room
    assert start()[1].documents == 300


@pytest.mark.parametrize("large", [False, True])
def test_overwritten_tokens_are_found(tmp_path, monkeypatch, large):
    if large:
        monkeypatch.setattr(token_cache, "HASHED_WHOLE", 0)
        monkeypatch.setattr(token_cache, "BLOCK", 100)
    start, lines = make_cache(tmp_path), []
    folder, data = start(lines.append)
    assert not [line for line in lines if "hashing" in line]
    file = folder / "train.bin"
    whole, info = file.read_bytes(), file.stat()
    for position in (0, len(whole) // 2, len(whole) - 2):
        file.write_bytes(whole[:position] + b"\xff\xff" + whole[position + 2 :])
        os.utime(file, ns=(1, 1))
        with pytest.raises(
            DataError, match=rf"{folder} is damaged \(train.bin: holds other tokens"
        ):
            start()
        os.utime(file, ns=(1, info.st_mtime_ns))
        if large and position == len(whole) // 2:
            # Neither in the blocks that are hashed, nor given away by the time: by its batch.
            data = start()[1].train
            with pytest.raises(
                DataError, match=rf"train.bin: token 65535 at position {position // 2}"
            ):
                train_batch(
                    data,
                    0,
                    global_batch_size=len(data),
                    seed=0,
                    dp_rank=0,
                    dp=1,
                    micro_batch_size=len(data),
                )
        else:
            with pytest.raises(DataError, match="holds other tokens"):
                start()
    file.write_bytes(whole)
    lines.clear()
    start(lines.append)  # whole, if copied without its time
    assert [line for line in lines if "hashing" in line] == [
        f"data: hashing {file}, which was copied or touched"
    ] * large


def test_content_key_is_fixed_for_ever(tmp_path):
    # A checkpoint holds it, and the same tokens must go on.
    file = write_jsonl(tmp_path / "x.jsonl", record("one two"), record("three"))
    section = DataSection(dataset=str(file), eval_fraction=0)
    folder = prepare_tokens(section, BYTES, tmp_path / "cache", lambda line: None)
    key = "94c2e3ae2368f794b7db504640e36f40010d958d515509f946f2ca9ba34e4471"
    assert open_tokens(folder, 8).content_key == key


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o002])
def test_folder_and_files_follow_the_umask_alike(tmp_path, umask):
    before = os.umask(umask)
    try:
        folder, _ = make_cache(tmp_path)()
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o777 & ~umask
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o666 & ~umask}


def test_cache_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    start = make_cache(tmp_path)
    start()

    def forbidden(path, *options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(token_cache, "read_json", forbidden)
    with pytest.raises(DataError, match=r"cannot be read \(meta.json: Permission denied\): get"):
        start()


def test_lock_that_is_no_file_is_refused_and_none_is_emptied(tmp_path):
    start = make_cache(tmp_path)
    folder, _ = start()
    lock = folder.with_suffix(".lock")
    shutil.rmtree(folder)
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(DataError, match=r"\.lock: is no regular file"):
        start()
    lock.unlink()
    (tmp_path / "kept").write_text("kept")
    lock.symlink_to(tmp_path / "kept")
    start()
    assert (tmp_path / "kept").read_text() == "kept"


def test_token_that_the_tokenizer_should_not_have_is_refused(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", record("text"))
    for size in (200, 100):
        small = dataclasses.replace(BYTES, name="small", vocab_size=size)
        with pytest.raises(DataError, match=f"--tokenizer small gives token 256, .* {size}"):
            build(file, tmp_path, small)


def test_too_little_text_names_both_numbers(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", record("12345678"))
    folder = prepare_tokens(
        DataSection(dataset=str(file), eval_fraction=0),
        BYTES,
        tmp_path / "cache",
        lambda line: None,
    )
    assert len(open_tokens(folder, 8).train) == 1
    with pytest.raises(DataError, match="--seq-len 9 needs 10 tokens and the training part has 9:"):
        open_tokens(folder, 9)


def test_open_tokens(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", *[record(f"document {i}") for i in range(90)])
    section = DataSection(dataset=str(file), eval_fraction=0.3)
    folder = prepare_tokens(section, BYTES, tmp_path / "cache", lambda line: None)
    data = open_tokens(folder, 16)
    assert data.train.tokens.dtype == np.uint16
    assert data.train_tokens + data.eval_tokens == 10 * 11 + 80 * 12
    assert (
        data.train_tokens == len(data.train.tokens) > data.eval_tokens == len(data.eval.tokens) > 0
    )
    with pytest.raises(ValueError, match="read-only"):
        data.train.tokens[0] = 0
    large = dataclasses.replace(BYTES, name="large", vocab_size=70_000, fingerprint="x")
    folder = prepare_tokens(section, large, tmp_path / "cache", lambda line: None)
    assert open_tokens(folder, 16).train.tokens.dtype == np.uint32
    assert np.array_equal(open_tokens(folder, 16).train.tokens, data.train.tokens)


# ------------------------------------------------------------------------------------------ batches


def test_shift_is_exact_and_each_token_is_a_target_once():
    data = Sequences(np.arange(23, dtype=np.uint16), 5)
    assert (len(data), data.len_with_tail) == (4, 5)
    inputs, targets = data.read(np.arange(6))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs[0].tolist() == [0, 1, 2, 3, 4] and targets[0].tolist() == [1, 2, 3, 4, 5]
    assert inputs[3].tolist() == [15, 16, 17, 18, 19] and targets[3].tolist() == [
        16,
        17,
        18,
        19,
        20,
    ]
    assert inputs[4].tolist() == [20, 21, 0, 0, 0]
    assert targets[4].tolist() == [21, 22, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]
    assert inputs[5].tolist() == [0] * 5 and targets[5].tolist() == [IGNORE_INDEX] * 5
    real = targets != IGNORE_INDEX
    assert torch.equal(targets[real], inputs[real] + 1)
    assert targets[real].tolist() == list(range(1, 23))


@pytest.mark.parametrize(
    "tokens, full, with_tail", [(0, 0, 0), (1, 0, 0), (2, 0, 1), (5, 1, 1), (6, 1, 2), (9, 2, 2)]
)
def test_number_of_sequences(tokens, full, with_tail):
    data = Sequences(np.arange(tokens, dtype=np.uint16), 4)
    assert (len(data), data.len_with_tail) == (full, with_tail)
    assert data.read(np.array([7, 8]))[1].tolist() == [[IGNORE_INDEX] * 4] * 2
    batches = eval_batches(data, global_batch_size=2, dp_rank=0, dp=1, micro_batch_size=2)
    assert len(list(batches)) == -(-with_tail // 2)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 64, 65, 1000])
def test_each_epoch_is_a_permutation_of_its_own(n):
    order = sample_indices(np.arange(40 * n), n, seed=3).reshape(40, n)
    assert (np.sort(order, axis=1) == np.arange(n)).all()
    distinct = len({tuple(epoch) for epoch in order.tolist()})
    assert distinct == {1: 1, 2: 2}.get(n, distinct)
    if n >= 3:
        assert distinct > 4
    if n >= 7:
        assert distinct > 35
        assert (sample_indices(np.arange(n), n, seed=4) != order[0]).any()


def test_order_is_a_pure_function_of_the_position():
    whole = sample_indices(np.arange(500), 90, seed=1)
    for start, stop in [(0, 1), (85, 95), (499, 500)]:
        assert (sample_indices(np.arange(start, stop), 90, seed=1) == whole[start:stop]).all()
    # Fixed for ever: a checkpoint holds a position in this order.
    assert whole[:8].tolist() == [76, 13, 27, 32, 11, 8, 40, 43]


def test_order_looks_random():
    n, epochs = 10, 3000
    order = sample_indices(np.arange(epochs * n), n, seed=0).reshape(epochs, n)
    counts = np.stack([np.bincount(order[:, place], minlength=n) for place in range(n)])
    assert abs(counts - epochs / n).max() < 6 * (epochs / n) ** 0.5
    large = sample_indices(np.arange(10_000), 10_000, seed=0)
    assert abs(np.corrcoef(np.arange(10_000), large)[0, 1]) < 0.05
    assert abs(np.corrcoef(large[:-1], large[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("n", [2**33, 2**33 + 1, 2**40])
def test_order_of_a_huge_corpus(n):
    positions = np.concatenate([np.arange(50_000), n - 1 - np.arange(50_000)])
    order = sample_indices(positions, n, seed=2**63 + 5)
    assert len(np.unique(order)) == len(positions)
    assert order.min() >= 0 and order.max() < n
    assert order.max() > 0.99 * n and order.min() < 0.01 * n
    # Far into the run too.
    assert len(np.unique(sample_indices(positions + 7 * n, n, seed=0))) == len(positions)


def test_order_of_no_samples_is_refused():
    with pytest.raises(ValueError, match="no sample"):
        sample_indices(np.arange(3), 0, seed=0)


SMALL = Sequences(np.arange(1, 60, dtype=np.uint16), 3)  # 19 sequences, ids are positions + 1


@pytest.mark.parametrize(
    "dp, micro_batch_size", [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (4, 1), (8, 1)]
)
def test_ranks_together_read_the_order_of_one_rank(dp, micro_batch_size):
    step_args = {"global_batch_size": 8, "seed": 5}
    for step in (0, 1, 2, 7):
        [(inputs, targets)] = train_batch(
            SMALL, step, dp_rank=0, dp=1, micro_batch_size=8, **step_args
        )
        positions = np.arange(8 * step, 8 * step + 8)
        assert (inputs[:, 0] - 1).div(3).tolist() == sample_indices(positions, 19, 5).tolist()
        ranks = [
            train_batch(
                SMALL, step, dp_rank=rank, dp=dp, micro_batch_size=micro_batch_size, **step_args
            )
            for rank in range(dp)
        ]
        assert {len(rank) for rank in ranks} == {8 // dp // micro_batch_size}
        pairs = list(itertools.chain(*ranks))
        assert all(pair[0].shape == (micro_batch_size, 3) for pair in pairs)
        assert torch.equal(torch.cat([pair[0] for pair in pairs]), inputs)
        assert torch.equal(torch.cat([pair[1] for pair in pairs]), targets)


def test_each_sample_once_per_epoch_over_all_ranks():
    read = []
    for step, rank in itertools.product(range(19), range(4)):
        for inputs, _ in train_batch(
            SMALL, step, global_batch_size=4, seed=0, dp_rank=rank, dp=4, micro_batch_size=1
        ):
            read.append((inputs[0, 0].item() - 1) // 3)
    for epoch in range(4):
        assert sorted(read[19 * epoch : 19 * epoch + 19]) == list(range(19))
    assert read[:19] != read[19:38]


def held_out(sequences, dp, **sizes):
    """Per rank, the number of micro-batches and the real targets."""
    sizes = {"global_batch_size": 2 * dp, "micro_batch_size": 1, **sizes}
    counts, targets = [], []
    for rank in range(dp):
        batches = [
            pair
            for batch in eval_batches(sequences, dp_rank=rank, dp=dp, **sizes)
            for pair in batch
        ]
        counts.append(len(batches))
        targets.append([t for b in batches for t in b[1].flatten().tolist() if t != IGNORE_INDEX])
    return counts, targets


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 22, 25, 26])
def test_each_held_out_target_once_and_as_many_batches_on_each_rank(dp, tokens):
    sequences = Sequences(np.arange(tokens, dtype=np.uint16), 3)
    counts, targets = held_out(sequences, dp)
    assert len(set(counts)) == 1
    assert counts[0] == 2 * -(-sequences.len_with_tail // (2 * dp))
    assert sorted(itertools.chain(*targets)) == list(range(1, tokens))


def test_held_out_order_and_limit():
    sequences = Sequences(np.arange(22, dtype=np.uint16), 3)  # 7 sequences
    assert held_out(sequences, 1, global_batch_size=4)[1] == [list(range(1, 22))]
    assert held_out(sequences, 1, global_batch_size=4, max_batches=1)[1] == [list(range(1, 13))]
    counts, targets = held_out(sequences, 2, global_batch_size=4, max_batches=1)
    assert (counts, targets) == ([2, 2], [list(range(1, 7)), list(range(7, 13))])
    assert held_out(sequences, 2, global_batch_size=4, max_batches=5)[0] == [4, 4]


# ----------------------------------------------------------------------------------------- prefetch


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_prefetch_starts_at_the_first_step_and_stays_two_ahead():
    made = []
    batches = prefetch(lambda step: made.append(step) or step * 10, 5, 12)
    assert next(batches) == 50
    # One consumed, two in the queue, one in the thread's hand.
    wait_for(lambda: made == [5, 6, 7, 8])
    time.sleep(0.2)
    assert made == [5, 6, 7, 8]
    assert list(batches) == [60, 70, 80, 90, 100, 110]
    assert made == list(range(5, 12)) and not prefetch_threads()
    assert list(prefetch(lambda step: step, 3, 3)) == []


def test_prefetch_carries_exceptions_to_the_consumer():
    def make(step):
        if step == 2:
            raise DataError("broken")
        return step

    batches = prefetch(make, 0, 10)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(DataError, match="broken"):
        next(batches)
    assert not prefetch_threads()


def test_prefetch_thread_ends_with_its_consumer():
    batches = prefetch(lambda step: step, 0, 10**9)
    assert next(batches) == 0 and len(prefetch_threads()) == 1
    batches.close()
    assert not prefetch_threads()
