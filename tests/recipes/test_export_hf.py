"""Hugging Face exchange: transformers -> --init-from -> a run -> export -> transformers."""

import argparse
import contextlib
import io
import json
import logging
import os
import pickle
import shutil
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers import LlamaConfig as HFConfig

import models.hf
import recipes.export_hf.export as exporting
from common.errors import ConfigError
from models.config import LlamaConfig
from models.decoder import Llama
from models.hf import INDEX, check_weights, load_weights
from models.hf_config import hf_config, read_hf_config
from parallel.launch import Launch, read_launch
from recipes.export_hf.export import export, parse_size
from recipes.export_hf.folder import discard
from recipes.generate import generate
from tests.models.test_reference import SCALING
from tests.ranks import Group, free_port
from tests.runs import rows, train
from tests.toy import draw_weights, full, make_model, make_ranks
from training.config.command_line import parse_flags
from training.data.tokenizer import load_tokenizer
from training.run.directory import RunDir
from training.start import check

ROOT = Path(__file__).parents[2]
ALONE = Launch(0, 1, 0, 1)
# The dimensions of tests.launch.SMALL, whose flags then override nothing; the vocabulary is cut
# unevenly by tp 2.
DIMS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
DIMS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 67}
VARIANTS = {
    "untied": {"max_position_embeddings": 16, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
    "tied-scaled": {
        "tie_word_embeddings": True,
        "head_dim": 32,
        "rope_theta": 10000.0,
        "rope_scaling": SCALING,
        "max_position_embeddings": 512,
    },
    "tied-bf16": {"tie_word_embeddings": True, "head_dim": 10, "dtype": "bfloat16"},
    "untied-bf16": {"dtype": "bfloat16"},
}
# An update that is lost in rounding, so that a run's checkpoint holds the weights it began with.
FROZEN = ["--lr", "1e-30", "--weight-decay", 0, "--optimizer", "sgd", "--warmup-steps", 0]
transformers.utils.logging.disable_progress_bar()
LETTERS = "abcdefghijklmnopqrstuvwxyz .\n"


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of single letters: 67 ids, EOS 66, BOS 65."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    vocab = {c: i for i, c in enumerate(LETTERS)}
    vocab |= {f"<{i}>": i for i in range(len(LETTERS), 65)} | {"<bos>": 65, "<eos>": 66}
    backend = Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)


def save_model(folder: Path, variant: str = "untied", max_shard_size: str = "5GB", **fields):
    """Write a random transformers model with a tokenizer; its weights by name, as saved."""
    torch.manual_seed(0)
    fields = json.loads(json.dumps(DIMS | VARIANTS[variant] | fields))
    dtype = getattr(torch, fields.pop("dtype", "float32"))
    model = LlamaForCausalLM(HFConfig(**fields))
    draw_weights(model)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    save_tokenizer(folder)
    return dict(model.named_parameters())


def read_llama(folder: Path) -> LlamaConfig:
    """The model that a config.json describes, with what it leaves open."""
    stated, assumed = read_hf_config(folder)
    return LlamaConfig(**stated, **assumed)


@contextlib.contextmanager
def no_warnings():
    """Fail if Python or transformers warns in this block."""
    said, log = [], logging.getLogger("transformers")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        log.removeHandler(handler)
    assert not said + [str(w.message) for w in caught]


def from_transformers(folder: Path) -> LlamaForCausalLM:
    """Load without arguments: every tensor is used, none is missing, nothing is said."""
    with no_warnings():
        model, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def assert_index_is_true(folder: Path, sharded: bool) -> None:
    """C34: every name of the index is in its file, and every tensor of a file in the index."""
    files = sorted(folder.glob("*.safetensors"))
    files_by_name = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            files_by_name |= dict.fromkeys(opened.keys(), file.name)
    if sharded:
        assert len(files) > 2
        assert files_by_name == json.loads((folder / INDEX).read_text())["weight_map"]
    else:
        assert [f.name for f in files] == ["model.safetensors"] and not (folder / INDEX).exists()


# A run from a Hugging Face directory, and back.


@pytest.fixture(scope="module")
def runs(launched4, tmp_path_factory):
    """A run of one step at 2x2 from each variant: (its run directory, the source, its weights)."""
    base, trained = tmp_path_factory.mktemp("hf"), {}

    def make(variant: str):
        if variant not in trained:
            source, run = base / f"{variant}-source", base / variant
            weights = save_model(source, variant, "20KB" if "scaled" in variant else "5GB")
            for name in ("pytorch_model.bin", "optimizer.pt"):
                plant_pickle(source / name, base / "executed")
            flags = ["--dtype", "bfloat16"] if variant == "tied-bf16" else []
            flags += ["--tp", 2, "--steps", 1, *FROZEN]
            text = train(launched4, run, "--init-from", source, *flags)
            assert f"initial weights from {source}\n" in text
            assert not (base / "executed").exists()
            trained[variant] = run, source, weights
        return trained[variant]

    return make


class _Planted:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def plant_pickle(file: Path, marker: Path) -> None:
    """A file that makes ``marker`` when it is unpickled."""
    file.write_bytes(pickle.dumps(_Planted(marker)))


def test_a_planted_pickle_would_show(tmp_path):
    plant_pickle(tmp_path / "x.bin", tmp_path / "executed")
    pickle.loads((tmp_path / "x.bin").read_bytes())
    assert (tmp_path / "executed").exists()


EXPORTS = {
    "untied": (None, "5GB", "float32"),
    "tied-scaled": (None, "30KB", "float32"),
    "tied-bf16": (None, "10KB", "float32"),  # as in the checkpoint
    "untied-bf16": ("bfloat16", "5GB", "bfloat16"),
}


@pytest.mark.parametrize("variant", EXPORTS)
@torch.no_grad()
def test_round_trip(variant, runs, tmp_path):
    """Bit for bit what came in, with the same logits as ours and the source's config."""
    run, source, weights = runs(variant)
    dtype, shard_size, written = EXPORTS[variant]
    out = tmp_path / "out"
    export(run, out, ALONE, dtype=dtype, max_shard_size=shard_size)
    model = from_transformers(out)
    assert model.dtype == getattr(torch, written)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    assert all(torch.equal(parameters[name], weights[name]) for name in weights)
    assert_index_is_true(out, sharded=shard_size != "5GB")

    with no_warnings():
        config, original = AutoConfig.from_pretrained(out), AutoConfig.from_pretrained(source)
    raw = json.loads((out / "config.json").read_text())
    assert raw["dtype"] == raw["torch_dtype"] == written
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"]
    assert raw["architectures"] == ["LlamaForCausalLM"]
    assert config.rope_parameters == original.rope_parameters
    for key in (*DIMS, "head_dim", "tie_word_embeddings", "rms_norm_eps"):
        assert getattr(config, key) == getattr(original, key), key
    assert config.max_position_embeddings == max(32, original.max_position_embeddings)
    generation = json.loads((out / "generation_config.json").read_text())
    for ids in (raw, generation):
        assert (ids["bos_token_id"], ids["eos_token_id"]) == (65, 66)

    ours = Llama(read_llama(out))
    assert check_weights(out, ours.config) == []
    load_weights(out, ours)
    tokens = torch.randint(0, 67, (2, 256))
    expected = model.float()(tokens).logits
    assert (ours(tokens) - expected).norm() / expected.norm() < 1e-5
    theirs = AutoTokenizer.from_pretrained(source)("some text.\n")
    assert load_tokenizer(str(out)).encode(["some text.\n"]) == [theirs["input_ids"]]


def test_old_keys_alone_and_new_keys_alone_say_the_same(runs, tmp_path):
    """Transformers 4 reads one spelling, 5 the other; both are in the file and each suffices."""
    export(runs("tied-scaled")[0], tmp_path / "out", ALONE)
    raw = json.loads((tmp_path / "out/config.json").read_text())
    read = []
    for dropped in (
        (),
        ("rope_parameters", "dtype"),
        ("rope_theta", "rope_scaling", "torch_dtype"),
    ):
        rest = {key: value for key, value in raw.items() if key not in dropped}
        (tmp_path / "config.json").write_text(json.dumps(rest))
        with no_warnings():
            config = AutoConfig.from_pretrained(tmp_path)
        read.append((config.rope_parameters, config.dtype, read_hf_config(tmp_path)))
    assert read[0] == read[1] == read[2]
    assert read[0][0]["factor"] == 8.0 and read[0][1] == torch.float32


@pytest.mark.parametrize("stated, longest", [(None, 512), (128, 128), (16, 32)])
def test_longest_sequence_of_scaled_rope(stated, longest, tmp_path):
    """A short training does not make it shorter than what the scaling is for, and none warns."""
    config = LlamaConfig(**DIMS, rope_scaling=SCALING, max_position_embeddings=stated)
    ids = {"bos_token_id": None, "eos_token_id": 66}
    described = hf_config(config, seq_len=32, dtype="float32", **ids)
    assert described["max_position_embeddings"] == longest
    if longest > SCALING["original_max_position_embeddings"]:
        (tmp_path / "config.json").write_text(json.dumps(described))
        with no_warnings():
            AutoConfig.from_pretrained(tmp_path)


def test_what_a_run_trained_is_exported(launched1, tmp_path):
    """The case above would not notice an export of the source; and the byte tokenizer."""
    train(launched1, tmp_path / "run", "--steps", 3, "--tie-word-embeddings")
    export(tmp_path / "run", tmp_path / "out", ALONE)
    from_transformers(tmp_path / "out")
    checkpoint = _checkpoint(tmp_path / "run")
    expected = {name.removeprefix("model."): value for name, value in checkpoint.items()}
    exported = load_file(tmp_path / "out/model.safetensors")
    assert exported.keys() == expected.keys() and "lm_head.weight" not in exported
    assert all(torch.equal(exported[name], expected[name]) for name in exported)

    ours, again = load_tokenizer("bytes"), load_tokenizer(str(tmp_path / "out"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.eos_token_id, len(theirs), again.vocab_size) == (256, 257, 257)
    for text in ("plain", "é 日本\x00\t\n  two", "<|endoftext|> is spelled, not meant", ""):
        (ids,) = ours.encode([text])
        assert ids == theirs(text)["input_ids"] == again.encode([text])[0]
        assert theirs.decode(ids) == text


def _checkpoint(run: Path) -> dict[str, torch.Tensor]:
    from tests.runs import checkpoint_tensors

    tensors = checkpoint_tensors(RunDir(run).newest_checkpoint())
    return {name: value for name, value in tensors.items() if name.startswith("model.")}


def test_a_checkpoint_beats_the_directory(runs, launched4):
    """Its weights are then not even looked at."""
    run, source, weights = runs("untied-bf16")
    (source / "model.safetensors").write_bytes(b"no safetensors")
    flags = ["--init-from", source, "--tp", 4, "--steps", 2, *FROZEN, "--lr-decay-steps", 1]
    text = train(launched4, run, *flags)
    assert "resumed from" in text and "initial weights" not in text
    assert [row["step"] for row in rows(run)] == [1, 2]
    name = "model.model.norm.weight"
    assert torch.equal(_checkpoint(run)[name], weights[name.removeprefix("model.")].float())


# What a rank reads.


class _Counted:
    """A safetensors file that counts the elements asked of it, and gives no whole tensor."""

    read = 0

    def __init__(self, *args, **kwargs):
        self._file = safe_open(*args, **kwargs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def keys(self):
        return self._file.keys()

    def get_slice(self, name):
        self._part = self._file.get_slice(name)
        return self

    def get_shape(self):
        return self._part.get_shape()

    def get_dtype(self):
        return self._part.get_dtype()

    def __getitem__(self, where):
        part = self._part[where]
        _Counted.read += part.numel()
        return part


def load_on_rank(folder: Path, tp: int, fields: dict) -> tuple[int, int, dict]:
    """Elements read by this rank, elements it holds, and the whole weights after the load."""
    ranks = make_ranks(tp)
    model = make_model(ranks, dtype="float32", **fields)
    _Counted.read, models.hf.safe_open = 0, _Counted
    try:
        load_weights(folder, model)
    finally:
        models.hf.safe_open = safe_open
    local = sum(p.to_local().numel() for p in model.parameters())
    return _Counted.read, local, {name: full(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("variant", ["untied", "tied-bf16"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_reads_its_slices(variant, tp, ranks4, tmp_path):
    weights = save_model(tmp_path, variant, "20KB")
    fields = read_llama(tmp_path).model_dump()
    results = ranks4.run(load_on_rank, tmp_path, tp, fields)
    total = LlamaConfig(**fields).num_parameters
    for read, local, loaded in results:
        assert read == local < total / 2
        assert loaded.keys() == weights.keys()
        for name, value in loaded.items():
            assert torch.equal(torch.from_numpy(value), weights[name].detach().float()), name
    # Norms and, at tp 4, the two key/value heads are on more than one rank; nothing else is.
    assert total <= sum(local for _, local, _ in results) < 1.5 * total


# Refusals, before torch.


def refusal(folder: Path, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(parse_flags(["--init-from", str(folder), *flags]), ALONE)
    message = str(caught.value)
    assert message.startswith(f"--init-from {folder}") and "\n" not in message
    return message


def rewrite(folder: Path, file: str = "model.safetensors", **changes) -> None:
    """Replace, add or (None) remove tensors of a file; ``__`` stands for a dot."""
    tensors = load_file(folder / file)
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / file, metadata={"format": "pt"})


def _truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])


def _only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    plant_pickle(folder / "pytorch_model.bin", folder / "executed")


def _fifo(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def _link(file: Path, target: str) -> None:
    file.unlink()
    file.symlink_to(target)


def _header(file: Path, content: object, size: int | None = None) -> None:
    """A safetensors file with a header and four bytes of tensors."""
    text = json.dumps(content).encode()
    file.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + bytes(4))


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
EVIL = "\x1b]0;x\x07\n"
SINGLE = {
    "missing": (
        lambda d: rewrite(d, model__layers__1__mlp__up_proj__weight=None, model__norm__weight=None),
        [],
        ["model.layers.1.mlp.up_proj.weight, model.norm.weight missing"],
    ),
    "unknown": (
        lambda d: rewrite(d, model__layers__0__self_attn__q_norm__weight=torch.ones(8)),
        [],
        ["model.layers.0.self_attn.q_norm.weight not known"],
    ),
    "shape": (
        lambda d: rewrite(d, model__norm__weight=torch.ones(31)),
        [],
        ["model.norm.weight is [31] there and [32]"],
    ),
    "vocab-flag": (
        lambda d: None,
        ["--vocab-size", "300"],
        ["model.embed_tokens.weight is [67, 32] there and [300, 32]"],
    ),
    "integers": (
        lambda d: rewrite(d, model__norm__weight=torch.ones(32, dtype=torch.int8)),
        [],
        ["model.norm.weight is I8", "BF16"],
    ),
    "no-head": (
        lambda d: rewrite(d, lm_head__weight=None),
        [],
        ["lm_head.weight missing", "--tie-word-embeddings"],
    ),
    "head-differs": (
        lambda d: None,
        ["--tie-word-embeddings"],
        ["lm_head.weight differs from model.embed_tokens.weight"],
    ),
    "truncated": (_truncate, [], ["model.safetensors cannot be read"]),
    "empty": (
        lambda d: (d / "model.safetensors").unlink(),
        [],
        ["holds no safetensors file: convert"],
    ),
    "pickle": (
        _only_pickle,
        [],
        ["no safetensors", "pytorch_model.bin is a pickle, and pickles are never read", "convert"],
    ),
    "twice": (
        lambda d: (
            save_file(load_file(d / "model.safetensors"), d / "a.safetensors"),
            (d / "model.safetensors").rename(d / "b.safetensors"),
        ),
        [],
        ["b.safetensors holds", "and so does", "a.safetensors"],
    ),
    "fifo": (lambda d: _fifo(d / "model.safetensors"), [], ["is no regular file"]),
    "device": (lambda d: _link(d / "model.safetensors", "/dev/zero"), [], ["is no regular file"]),
    "loop": (
        lambda d: _link(d / "model.safetensors", "model.safetensors"),
        [],
        ["cannot be read: Too many levels of symbolic links"],
    ),
    "broken-link": (
        lambda d: _link(d / "model.safetensors", "none"),
        [],
        ["model.safetensors cannot be read: No such file"],
    ),
    "large-header": (
        lambda d: _header(d / "model.safetensors", {}, 2**60),
        [],
        ["header too large"],
    ),
    "overlap": (
        lambda d: _header(d / "model.safetensors", {"a": ONE, "b": ONE}),
        [],
        ["model.safetensors cannot be read"],
    ),
    "evil-name": (
        lambda d: rewrite(d, **{EVIL: torch.ones(3)}),
        [],
        [r"\x1b]0;x\x07\n not known to this model"],
    ),
    "evil-dtype": (
        lambda d: _header(d / "model.safetensors", {"a": ONE | {"dtype": EVIL}}),
        [],
        [r"unknown variant `\x1b]0;x\x07\n`"],
    ),
    "evil-file": (
        lambda d: (d / "model.safetensors").rename(d / f"{EVIL}.safetensors").write_bytes(b""),
        [],
        [r"\x1b]0;x\x07\n.safetensors cannot be read"],
    ),
    "no-dims": (
        lambda d: rewrite(d, model__norm__weight=torch.tensor(1.0)),
        [],
        ["model.norm.weight is [] there"],
    ),
}


@pytest.mark.parametrize("spoil, flags, fragments", SINGLE.values(), ids=SINGLE)
def test_refused_weights(spoil, flags, fragments, tmp_path, no_launcher):
    save_model(tmp_path / "hf")
    check(parse_flags(["--init-from", str(tmp_path / "hf")]), ALONE)
    spoil(tmp_path / "hf")
    message = refusal(tmp_path / "hf", *flags)
    assert all(fragment in message for fragment in fragments), message
    assert not (tmp_path / "hf/executed").exists()


def _edit_index(folder: Path, name: str, file: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))


FIRST = "model-00001-of-00003.safetensors"
SHARDED = {
    "missing-file": (
        lambda d: (d / FIRST).unlink(),
        [f"{INDEX} names {FIRST}, and there is no such file"],
    ),
    "not-held": (
        lambda d: _edit_index(d, "lm_head.weight", FIRST),
        [f"{INDEX} names lm_head.weight in {FIRST}, which does not hold it"],
    ),
    "not-json": (lambda d: (d / INDEX).write_text("{"), [f"{INDEX} cannot be read"]),
    "not-a-map": (lambda d: (d / INDEX).write_text("[]"), [f"{INDEX} cannot be read"]),
    "deep": (lambda d: (d / INDEX).write_text("[" * 10**5), ["is nested too deeply"]),
    "twice": (
        lambda d: (d / INDEX).write_text('{"weight_map": {"a": "b", "a": "c"}}'),
        ["states 'a' twice"],
    ),
    "number": (lambda d: _edit_index(d, "lm_head.weight", 5), ["must name a file for each"]),
    "fifo": (lambda d: _fifo(d / INDEX), ["is no regular file"]),
    "escape": (
        lambda d: _edit_index(d, "\x1b]0;x\x07\n", FIRST),
        [rf"{INDEX} names \x1b]0;x\x07\n in {FIRST}, which does not hold it"],
    ),
    **{
        f"outside-{name!r}": (
            lambda d, name=name: _edit_index(d, "lm_head.weight", name),
            [f"{INDEX} names {name.encode('unicode_escape').decode()}, and there is no such file"],
        )
        for name in (f"../hf/{FIRST}", f"./{FIRST}", "/dev/zero", "..", "", "a\0b", "\x1b[31m\n")
    },
}


@pytest.mark.parametrize("spoil, fragments", SHARDED.values(), ids=SHARDED)
def test_refused_index(spoil, fragments, tmp_path, no_launcher):
    """C34, C69: what the index says must be there."""
    save_model(tmp_path / "hf", max_shard_size="40KB")
    assert (tmp_path / "hf" / FIRST).exists()
    check(parse_flags(["--init-from", str(tmp_path / "hf")]), ALONE)
    spoil(tmp_path / "hf")
    message = refusal(tmp_path / "hf")
    assert all(fragment in message for fragment in fragments), message


def test_shards_without_an_index(tmp_path):
    save_model(tmp_path, max_shard_size="40KB")
    (tmp_path / INDEX).unlink()
    (tmp_path / "._model.safetensors").write_bytes(b"of another system")
    assert check_weights(tmp_path, read_llama(tmp_path)) == []


def test_links_of_the_hub_cache(tmp_path):
    """There each file is a link out of the directory."""
    save_model(tmp_path / "hf", max_shard_size="40KB")
    for file in (tmp_path / "hf").glob("*.*"):
        file.rename(tmp_path / file.name)
        file.symlink_to(f"../{file.name}")
    assert check_weights(tmp_path / "hf", read_llama(tmp_path / "hf")) == []


def test_old_buffers_are_ignored_with_a_note(tmp_path, no_launcher, capsys):
    """C69."""
    save_model(tmp_path / "hf")
    rewrite(
        tmp_path / "hf",
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4),
        rope__freqs=torch.ones(4),
    )
    check(parse_flags(["--init-from", str(tmp_path / "hf")]), ALONE)
    (line,) = capsys.readouterr().err.splitlines()
    assert "ignored model.layers.0.self_attn.rotary_emb.inv_freq, rope.freqs" in line


@pytest.mark.parametrize("variant", ["tied-scaled", "tied-bf16"])
def test_tied_with_a_head_of_its_own(variant, tmp_path, no_launcher, monkeypatch):
    """C35: allowed where it is the embedding, also in bfloat16, which numpy does not have."""
    monkeypatch.setattr(models.hf, "COMPARE_BYTES", 100)
    save_model(tmp_path / "hf", variant)
    head = load_file(tmp_path / "hf/model.safetensors")["model.embed_tokens.weight"].clone()
    rewrite(tmp_path / "hf", lm_head__weight=head)
    check(parse_flags(["--init-from", str(tmp_path / "hf")]), ALONE)
    head[-1, -1] += 1
    rewrite(tmp_path / "hf", lm_head__weight=head)
    assert "lm_head.weight differs" in refusal(tmp_path / "hf")


def test_refused_directories(tmp_path, no_launcher):
    save_model(tmp_path / "hf")
    hub = refusal(Path("meta-llama/Llama-3.2-1B"))
    assert "no such folder" in hub
    assert "hf download meta-llama/Llama-3.2-1B --local-dir DIR" in hub
    assert "is not a directory" in refusal(tmp_path / "hf/config.json")
    assert "--model-config x" in refusal(tmp_path / "hf", "--model-config", "x")
    (tmp_path / "hf/config.json").write_text('{"model_type": "gpt2"}')
    assert "'gpt2'" in refusal(tmp_path / "hf")
    (tmp_path / "hf/config.json").unlink()
    assert "config.json" in refusal(tmp_path / "hf")


def test_the_tokenizer_of_the_directory(tmp_path, no_launcher, capsys):
    """It goes with the weights: over the recipe's, below a flag; each departure is said."""
    folder = tmp_path / "hf"
    save_model(folder, "tied-scaled")
    config = parse_flags(["--init-from", f"{folder}/"])  # the same name with and without a slash
    assert config.data.tokenizer == str(folder) and config.model.vocab_size == 67
    assert config.model.max_position_embeddings == 512
    assert capsys.readouterr().err == ""
    flags = ["--init-from", str(folder), "--tokenizer", "bytes", "--rope-theta", "7"]
    assert parse_flags(flags).data.tokenizer == "bytes"
    assert capsys.readouterr().err.splitlines() == [
        "--rope-theta 7.0 overrides 10000.0 of --init-from",
        f"--tokenizer bytes overrides {folder} of --init-from",
    ]
    (folder / "tokenizer.json").unlink()
    assert parse_flags(flags[:2]).data.tokenizer == "bytes"
    (line,) = capsys.readouterr().err.splitlines()
    assert "no tokenizer.json" in line and "--tokenizer bytes" in line


def test_refused_before_torch(tmp_path):
    """Both commands say one line and exit with 2, and neither check needs torch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('stub')\n")
    save_model(tmp_path / "hf")
    rewrite(tmp_path / "hf", model__norm__weight=None)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    start = ["train_llm.py", "--run-dir", tmp_path / "run", "--init-from", tmp_path / "hf"]
    for command, said in (
        (start, "train_llm.py: error: --init-from"),
        (["-m", "recipes.export_hf", "nope", "out"], "export_hf: error: nope is no directory"),
        (["-m", "recipes.generate", "nope"], "generate: error: nope is no directory"),
        (["-m", "recipes.generate", "x", "--temperature", "-1"], "generate: error: argument --t"),
    ):
        done = subprocess.run(
            [sys.executable, *map(str, command)], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert done.returncode == 2 and done.stderr.startswith(said), done.stderr
        assert done.stderr.count("\n") == 1


# Export.


def test_export_on_two_processes(runs, tmp_path, monkeypatch):
    """They share the files, say nothing to each other, and hold no more than a file at a time."""
    run, _, weights = runs("tied-scaled")
    export(run, tmp_path / "one", ALONE, max_shard_size="30KB")
    sizes, load = [], exporting.load_tensors

    def counted(checkpoint, tensors, **options):
        sizes.append(sum(t.numel() for t in tensors.values()))
        load(checkpoint, tensors, **options)

    monkeypatch.setattr(exporting, "load_tensors", counted)
    # Rank 0 makes the folder when it has checked everything.
    checkpoint = RunDir(run).newest_checkpoint()
    exporting.partial_folder(checkpoint, tmp_path / "two", "float32", 30_000).mkdir()
    export(run, tmp_path / "two", Launch(1, 2, 1, 2), max_shard_size="30KB")
    assert not (tmp_path / "two").exists(), "rank 0 completes it"
    after_one = len(sizes)
    export(run, tmp_path / "two", Launch(0, 2, 0, 2), max_shard_size="30KB")
    assert 0 < after_one < len(sizes) == len(list((tmp_path / "two").glob("*.safetensors")))
    assert max(sizes) <= 30_000 / 4 and sum(sizes) == sum(w.numel() for w in weights.values())
    names = {p.name for p in (tmp_path / "one").iterdir()}
    assert names == {p.name for p in (tmp_path / "two").iterdir()}
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    export(run, tmp_path / "two", Launch(1, 2, 1, 2))  # late, with nothing to do
    assert {p.name for p in tmp_path.iterdir()} == {"one", "two"}


def test_a_killed_export_leaves_nothing_that_looks_complete(runs, tmp_path, monkeypatch):
    """At any moment: nothing is at OUT_DIR, and the same command then completes it."""
    run, written = runs("tied-scaled")[0], []

    def dies(*_):
        raise KeyboardInterrupt

    for name, dying in (("sync", 2), ("write_small_files", 1)):
        calls, real = [], getattr(exporting, name)

        def until(*args, calls=calls, real=real, dying=dying):
            calls.append(args)
            return dies() if len(calls) == dying else real(*args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(exporting, name, until)
            export(run, tmp_path / "out", ALONE, max_shard_size="30KB")
        assert not (tmp_path / "out").exists()
        (partial,) = tmp_path.iterdir()
        assert partial.name.startswith(".out.partial-")
        written.append({p.name: p.stat().st_mtime_ns for p in partial.glob("*.safetensors")})
    assert len(written[0]) == 1 < len(written[1]) and written[0].items() <= written[1].items()
    export(run, tmp_path / "out", ALONE, max_shard_size="30KB")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert not [p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]
    from_transformers(tmp_path / "out")


def test_refused_exports(runs, tmp_path):
    run = runs("tied-scaled")[0]
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("")
    (tmp_path / "none/checkpoints").mkdir(parents=True)
    broken = tmp_path / "broken/checkpoints/step-00000001"
    broken.mkdir(parents=True)
    (broken / "state.json").write_text('{"identity": {"seq_len": 3}}')
    damaged = tmp_path / "damaged"
    shutil.copytree(RunDir(run).newest_checkpoint(), damaged)
    sorted(damaged.glob("*.distcp"))[-1].unlink()
    for path, out, size, said in (
        (damaged, "out", "5GB", "damaged is damaged .__3_0.distcp is missing"),
        (run, "taken", "5GB", "taken exists and is not empty"),
        (tmp_path / "none", "out", "5GB", "no complete checkpoint"),
        (tmp_path / "broken", "out", "5GB", "no complete checkpoint"),
        (broken, "out", "5GB", "state.json cannot be read .DamageError: SHA256SUMS is missing"),
        (run, "out", "5 apples", "--max-shard-size 5 apples"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            export(path, tmp_path / out, ALONE, max_shard_size=size)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    # An empty directory is filled; a checkpoint can be named instead of its run.
    (tmp_path / "empty").mkdir()
    export(RunDir(run).newest_checkpoint(), tmp_path / "empty", ALONE)
    from_transformers(tmp_path / "empty")


def spoil_model(monkeypatch) -> None:
    shapes = LlamaConfig.parameter_shapes.fget
    norm = {"model.layers.0.self_attn.q_norm.weight": (8,)}
    monkeypatch.setattr(LlamaConfig, "parameter_shapes", property(lambda c: shapes(c) | norm))


def spoil_checkpoint(monkeypatch) -> None:
    # As of a model with a parameter that the table of shapes does not have.
    shapes = LlamaConfig.parameter_shapes.fget
    fewer = property(lambda c: {n: s for n, s in shapes(c).items() if n != "model.norm.weight"})
    monkeypatch.setattr(LlamaConfig, "parameter_shapes", fewer)


def spoil_config(monkeypatch) -> None:
    monkeypatch.setattr(exporting, "hf_config", lambda *a, **k: hf_config(*a, **k) | {"new": 1})


def lose_theta(monkeypatch) -> None:
    def without(*args, **options):
        lost = ("rope_theta", "rope_parameters")
        return {k: v for k, v in hf_config(*args, **options).items() if k not in lost}

    monkeypatch.setattr(exporting, "hf_config", without)


def refused_there(monkeypatch) -> None:
    def refuse(*_):
        raise ValueError("not a\nmultiple")

    monkeypatch.setattr(HFConfig, "from_dict", refuse)


def damage_file(monkeypatch) -> None:
    def damaged(partial, *args):
        rewrite(partial, model__norm__weight=torch.ones(32, dtype=torch.float16))
        return real(partial, *args)

    real = exporting.complete
    monkeypatch.setattr(exporting, "complete", damaged)


def overflow(monkeypatch) -> None:
    def too_large(_, tensors, **options):
        for tensor in tensors.values():
            tensor.copy_(torch.full_like(tensor, 1e30).to(torch.float16))

    monkeypatch.setattr(exporting, "load_tensors", too_large)


INEXACT = {
    "model": (spoil_model, "no model.layers.0.self_attn.q_norm.weight"),
    "checkpoint": (spoil_checkpoint, r"it has model.norm.weight \[32\]"),
    "unknown-key": (spoil_config, "cannot be read: new is 1, which this model does not know"),
    "lost-field": (lose_theta, "rope_theta of this model is 1000000.0 and would be 10000.0"),
    "refused": (refused_there, "transformers refuses the config .* not a multiple"),
    "overflow": (overflow, "model.embed_tokens.weight holds values that are not finite"),
    "written": (damage_file, "what was written is damaged .model.norm.weight is .*F16"),
}


@pytest.mark.parametrize("spoil, said", INEXACT.values(), ids=INEXACT)
def test_an_inexact_export_is_refused(spoil, said, runs, tmp_path, monkeypatch):
    """What transformers would not take exactly is not written, and nothing is left of it."""
    spoil(monkeypatch)
    with pytest.raises(ConfigError, match=said) as caught:
        export(runs("untied")[0], tmp_path / "out", ALONE)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_every_field_of_the_model_is_in_its_config_json():
    """Or the export of a run that sets it is refused."""
    ends = {"bos_token_id": None, "eos_token_id": None}
    described = hf_config(LlamaConfig(**DIMS), seq_len=8, dtype="float32", **ends)
    assert LlamaConfig.model_fields.keys() <= described.keys()


@pytest.mark.parametrize("size", ["0", "-5GB", "1e999GB", "", "nanGB", "5", "0.0KB"])
def test_refused_shard_sizes(size):
    with pytest.raises(ConfigError, match=f"--max-shard-size {size} is no size above 0"):
        parse_size(size)


def test_refused_out_dirs(runs, tmp_path):
    """Each in one line, and none leaves anything."""
    run = runs("untied")[0]
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.iterdir())
    checkpoint = RunDir(run).newest_checkpoint()
    for out, said in (
        (Path("/"), "exists and is not empty"),
        (Path("."), "exists and is not empty"),
        (Path("/proc/x"), "cannot be made"),
        (tmp_path / "loop", "loop"),
        (tmp_path / "file", "exists and is not empty"),
        (tmp_path / "file/below", "cannot be made"),
        (tmp_path / ("n" * 240), "File name too long"),
        (checkpoint / "out", "is among the checkpoints"),
        (checkpoint.parent / "out", "is among the checkpoints"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            export(run, out, ALONE)
        assert "\n" not in str(caught.value) and "OUT_DIR" in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "link").symlink_to(tmp_path / "target")
    export(run, tmp_path / "link", ALONE)
    assert (tmp_path / "target/config.json").is_file()


def test_a_failed_export_leaves_nothing(runs, tmp_path, monkeypatch, capfd):
    """A checkpoint removed or damaged meanwhile, an OUT_DIR that appears, a full disk."""
    run, real = tmp_path / "run", exporting.write_shard
    out, checkpoint = tmp_path / "out", run / "checkpoints/step-00000001"

    def truncate():
        for file in checkpoint.glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:100])

    def taken():
        out.mkdir()
        (out / "file").write_text("")

    def full():
        raise OSError(28, "No space left on device", "a file")

    for happens, said, code in (
        (lambda: shutil.rmtree(checkpoint), "step-00000001 cannot be read", 2),
        (truncate, "step-00000001 cannot be read", 2),
        (taken, "cannot be put in place (Directory not empty)", 2),
        (full, "is not written (a file: No space left on device)", 1),
    ):
        shutil.copytree(runs("untied")[0], run)

        def write(*args, happens=happens):
            if len(list(args[-1].parent.glob("*.safetensors"))) == 1:
                happens()
            real(*args)

        monkeypatch.setattr(exporting, "write_shard", write)
        # It leaves without a word to this process: a refusal ends with os._exit.
        monkeypatch.setattr(exporting, "refuse", lambda message, *_: sys.exit(f"error: {message}"))
        try:
            assert exporting.main([str(run), str(out), "--max-shard-size", "30KB"]) == code == 1
            (line,) = capfd.readouterr().err.splitlines()
        except SystemExit as refused:
            line = refused.code
            assert code == 2 and not capfd.readouterr().err
        assert said in line and "\n" not in line
        shutil.rmtree(run)
        shutil.rmtree(out, ignore_errors=True)
        assert not list(tmp_path.iterdir())


def test_a_process_that_fails_ends_the_others(runs, tmp_path, monkeypatch):
    """It takes the folder away, and they notice, also where no launcher ends them."""

    def fails(*args):
        discard(args[-1].parent)
        raise FileNotFoundError(2, "No such file or directory", "a file")

    monkeypatch.setattr(exporting, "write_shard", fails)
    with pytest.raises(ConfigError, match="another process of this export has failed"):
        export(runs("untied")[0], tmp_path / "out", ALONE)
    assert not list(tmp_path.iterdir())


def test_two_exports_at_once(runs, tmp_path, monkeypatch):
    """The second, with the same settings or others, is refused; the first goes on."""
    run, refused = runs("untied")[0], []
    real = exporting.write_small_files

    def meanwhile(*args):
        monkeypatch.setattr(exporting, "write_small_files", real)
        for dtype in ("float32", "bfloat16"):
            with pytest.raises(ConfigError, match="is being written by another export") as caught:
                export(run, tmp_path / "out", ALONE, dtype=dtype)
            refused.append(str(caught.value))
        real(*args)

    monkeypatch.setattr(exporting, "write_small_files", meanwhile)
    export(run, tmp_path / "out", ALONE)
    assert len(refused) == 2
    from_transformers(tmp_path / "out")
    assert not list((tmp_path / "out").glob(".*"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Generation.


@pytest.fixture(scope="module")
def launched3():
    group = Group(3, process_group=False)
    yield group
    group.close()


def _disturb(module, _, output):
    if isinstance(module, LlamaForCausalLM):
        output.logits += torch.linspace(-20, 20, output.logits.shape[-1])  # draws nothing


def speak_apart(*args, **options):
    """As :func:`speak`, where all ranks but the first have other logits."""
    if read_launch().rank == 0:
        return speak(*args, **options)
    with torch.nn.modules.module.register_module_forward_hook(_disturb):
        return speak(*args, **options)


def speak(path: Path, port: int, **options) -> tuple[list[int], str]:
    """Ids and printed text of this rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # What is freed here must not be found again in the rotary tables.
    poison = [torch.full((n,), torch.nan) for n in range(1, 65) for _ in range(20)]
    del poison
    defaults = {
        "prompt": "",
        "max_new_tokens": 24,
        "temperature": 0.0,
        "seed": 0,
        "tokenizer": None,
    }
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        ids = generate(path, read_launch(), argparse.Namespace(**(defaults | options)))
    return ids, out.getvalue()


@pytest.mark.parametrize("variant", ["untied", "tied-scaled", "tied-bf16"])
def test_generate(variant, runs, launched1, launched3, tmp_path):
    """The exported model's own greedy tokens, on one process and on three."""
    run, source, _ = runs(variant)
    export(run, tmp_path / "out", ALONE)
    prompt = [66, *load_tokenizer(str(source)).encode(["a text"])[0]]
    expected = from_transformers(tmp_path / "out").generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=66
    )
    expected = expected[0].tolist()
    assert len(set(expected[7:])) > 3
    for group in (launched1, launched3):
        results = group.run(speak, run, free_port(), prompt="a text")
        assert [ids for ids, _ in results] == [expected] * group.world_size
        text = load_tokenizer(str(source)).decode(expected[1:])
        assert [out for _, out in results] == [text + "\n"] + [""] * (group.world_size - 1)


def test_sampling(runs, launched1, launched3):
    """The same seed gives the same text on any number of processes; another seed another."""
    run = runs("untied")[0]
    texts = [
        group.run(speak, run, free_port(), temperature=t, seed=s)[0][0]
        for group in (launched1, launched3)
        for t, s in ((1.0, 0), (1.0, 1), (0.0, 1))
    ]
    assert texts[:3] == texts[3:] and len(set(map(tuple, texts))) == 3
    apart = launched3.run(speak_apart, run, free_port(), temperature=1.0)
    assert [ids for ids, _ in apart] == [texts[0]] * 3
