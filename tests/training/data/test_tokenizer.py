"""The ids of a text are those of tokenizer.json, whatever the text is and however long."""

import glob
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from common.errors import ConfigError
from parallel.launch import Launch
from recipes.export_hf.export import export
from recipes.export_hf.tokenizer import load_checkpoint_tokenizer
from tests.runs import SMALL, forked
from training.config.command_line import parse_flags
from training.data import tokenizer as tokenizer_module
from training.data.text_files import DataError
from training.data.tokenizer import EncodingError, load_tokenizer

EOS, BOS = "<|end|>", "<|begin|>"
# The regular expression of Llama 3's tokenizer.json.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CODE = "def  hello(world):\n    return  world + 12345 - 2026\r\n\tx\n"


def _byte_level(**options) -> Backend:
    backend = Backend(models.BPE(**options))
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _gpt2() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return backend


def _llama2() -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>"))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)
    return backend


def _unigram() -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return backend


def _bert() -> Backend:
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def _words() -> Backend:
    backend = Backend(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


KINDS = {
    "llama3": _byte_level,
    # A whole word that is in the vocabulary is taken before any merge.
    "whole words": lambda: _byte_level(ignore_merges=True),
    "gpt2": _gpt2,
    "llama2": _llama2,
    "unigram": _unigram,
    "bert": _bert,
    "words": _words,
}


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    lines = Path(json.__file__).read_text().splitlines(keepends=True)
    return [*lines, CODE, "日本語 ünï \ufb01\n"]


@pytest.fixture(scope="module")
def folder_of(corpus, tmp_path_factory):
    """A folder with a tokenizer of a kind, trained once."""
    folders = {}

    def get(kind: str) -> Path:
        if kind not in folders:
            folder = folders[kind] = tmp_path_factory.mktemp("tok")
            backend = KINDS[kind]()
            options = {"vocab_size": 500, "special_tokens": [EOS, BOS, "<unk>"]}
            if isinstance(backend.model, models.Unigram):
                options["unk_token"] = "<unk>"
            trainer = backend.model.get_trainer()
            trainer = type(trainer)(**options, show_progress=False)
            if "ByteLevel" in str(backend.pre_tokenizer):
                trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
            backend.train_from_iterator(corpus, trainer)
            backend.save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text(
                json.dumps({"eos_token": {"content": EOS}, "tokenizer_class": "GPT2Tokenizer"})
            )
        return folders[kind]

    return get


def reference(folder: Path, text: str) -> list[int]:
    return (
        Backend.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    )


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_file(kind, folder_of):
    """Also through a class that rebuilds it, and by the path of the file itself."""
    folder = folder_of(kind)
    expected = reference(folder, CODE * 3)
    for name in (folder, folder / "tokenizer.json"):
        assert load_tokenizer(str(name)).encode([CODE * 3]) == [expected]


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_is_a_special_token(kind, folder_of):
    tokenizer = load_tokenizer(str(folder_of(kind)))
    texts = [f"The token {EOS} is written {BOS} here.", EOS, f"{EOS}{EOS}x", f"a{BOS}", EOS * 2000]
    for ids in tokenizer.encode(texts):
        assert ids and not {0, 1} & set(ids)
    # What is beside it is as without.
    assert tokenizer.encode([f"The token {EOS}"])[0][:2] == tokenizer.encode(["The token"])[0][:2]


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<|x|>", special=True, normalized=True, lstrip=True, rstrip=True),
        AddedToken("<|x|>", special=True, single_word=True),
        AddedToken("<|x|>", special=False),  # it is the EOS all the same
        AddedToken("ab", special=True),
    ],
)
def test_special_tokens_of_other_kinds(token, folder_of, tmp_path):
    backend = Backend.from_file(str(folder_of("llama3") / "tokenizer.json"))
    backend.add_tokens([token])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token.content}))
    tokenizer = load_tokenizer(str(tmp_path))
    (ids,) = tokenizer.encode([f"one  {token.content}  two {token.content}"])
    assert tokenizer.eos_id not in ids
    assert "one" in tokenizer.decode(ids) and "two" in tokenizer.decode(ids)


def test_a_letter_that_is_a_special_token_alone_is_refused(folder_of, tmp_path):
    backend = Backend.from_file(str(folder_of("words") / "tokenizer.json"))
    backend.add_tokens([AddedToken("§", special=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "§"}))
    with pytest.raises(EncodingError, match=r"'§'.*special token alone"):
        load_tokenizer(str(tmp_path)).encode(["a § b"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_document_is_encoded_whole(kind, folder_of, corpus, monkeypatch):
    tokenizer = load_tokenizer(str(folder_of(kind)))
    spaces = "a\n \n\n\n  b" * 300 + " " * 700 + "x" * 500 + "日本語 ünï " * 200
    text = "".join(corpus) + spaces + f" {EOS} " + "".join(corpus[::-1])
    (whole,) = tokenizer.encode([text])
    for window in (20_000, 20_011):
        monkeypatch.setattr(tokenizer_module, "WINDOW_CHARS", window)
        monkeypatch.setattr(tokenizer_module, "OVERLAP_CHARS", 4000)
        assert len(text) > 1.2 * window
        assert tokenizer.encode_long(text).tolist() == whole


def test_a_word_without_end_is_refused_and_not_cut(folder_of, monkeypatch):
    """Its merges begin at its start, so that no window in the middle knows them."""
    tokenizer = load_tokenizer(str(folder_of("llama3")))
    monkeypatch.setattr(tokenizer_module, "WINDOW_CHARS", 3000)
    monkeypatch.setattr(tokenizer_module, "OVERLAP_CHARS", 1000)
    (whole,) = tokenizer.encode(["return" * 3001])
    try:
        assert tokenizer.encode_long("return" * 3001).tolist() == whole
    except EncodingError as error:
        assert "split it into documents" in str(error)


WRONG = {
    "not an object": ({"tokenizer_config.json": "[1]"}, "holds no JSON object"),
    "nested": ({"tokenizer_config.json": '{"a":' * 50_000}, "nested too deeply"),
    "no such eos": ({"tokenizer_config.json": '{"eos_token": "<x>"}'}, "'<x>'.*is no token"),
    "eos of no kind": ({"tokenizer_config.json": '{"eos_token": [1]}'}, "is no token"),
    "no eos": ({"tokenizer_config.json": "{}"}, 'no EOS token.*set "eos_token"'),
    "several": (
        {"tokenizer_config.json": "{}", "generation_config.json": '{"eos_token_id": [0, 1]}'},
        "generation_config.json names 2 ids",
    ),
    "damaged": ({"tokenizer.json": '{"model": 1}'}, "tokenizer.json cannot be read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_one_line(case, folder_of, tmp_path):
    shutil.copytree(folder_of("llama3"), tmp_path / "tok")
    files, message = WRONG[case]
    for name, text in files.items():
        (tmp_path / "tok" / name).write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(str(tmp_path / "tok"))
    assert str(caught.value).startswith("--tokenizer ") and "\n" not in str(caught.value)


def test_one_id_beside_a_model_is_its_eos(folder_of, tmp_path):
    shutil.copy(folder_of("llama3") / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert load_tokenizer(str(tmp_path)).eos_id == 1


def test_a_hub_name_without_network(folder_of, tmp_path, monkeypatch):
    """From the cache of huggingface_hub."""
    from huggingface_hub import constants

    snapshot = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    shutil.copytree(folder_of("llama3"), snapshot)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_tokenizer("org/name").encode([CODE]) == [reference(snapshot, CODE)]


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_init_from_with_a_tokenizer_of_another_format(name, tmp_path):
    from tests.recipes.test_export_hf import save_model

    directory = tmp_path / "hf"
    save_model(directory)
    (directory / "tokenizer.json").unlink()
    (directory / name).write_text("x")
    with pytest.raises(ConfigError, match=rf"--init-from .*{name}.*save_pretrained.*--tokenizer"):
        parse_flags(["--init-from", str(directory)])


def test_a_run_keeps_its_tokenizer(folder_of, tmp_path, monkeypatch):
    """It goes on, and is exported, where the folder that it was started with has gone."""
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARALLEL_RECIPES_CACHE", str(tmp_path / "cache"))
    shutil.copytree(folder_of("llama3"), "tok")
    flags = [*SMALL, "--tokenizer", "./tok", "--run-dir", "run", "--lr-decay-steps", "3"]
    code, out, err = forked(*flags, "--steps", "1")
    assert code == 0, out + err
    assert f'tokenizer = "{tmp_path}/tok"' in Path("run/config.toml").read_text()
    Path("tok").rename("moved")
    code, out, err = forked(*flags, "--steps", "2")
    assert code == 0 and "going on with its copy in run/tokenizer" in err, out + err

    checkpoint = Path(glob.glob("run/checkpoints/step-*2")[0])
    for path in (Path("run"), checkpoint):
        export(path, Path(f"out-{path.name}"), Launch(0, 1, 0, 1))
    exported = Path("out-run")
    original = (folder_of("llama3") / "tokenizer.json").read_bytes()
    assert (exported / "tokenizer.json").read_bytes() == original
    theirs = AutoTokenizer.from_pretrained(exported)
    assert theirs(CODE, add_special_tokens=False)["input_ids"] == reference(exported, CODE)
    assert theirs.eos_token == EOS
    config = json.loads((exported / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, 0)

    fingerprint = load_tokenizer("moved").fingerprint
    identity = {"tokenizer": "tok", "tokenizer_fingerprint": fingerprint, "vocab_size": 500}
    assert load_checkpoint_tokenizer(checkpoint, identity, "moved").name == "moved"
    with pytest.raises(ConfigError, match=r"--tokenizer .* gives other ids"):
        load_checkpoint_tokenizer(checkpoint, identity, str(folder_of("gpt2")))
    old = identity | {"tokenizer_fingerprint": None}
    assert load_checkpoint_tokenizer(checkpoint, old, "bytes")
    with pytest.raises(ConfigError, match=r"has 257 ids, and the model .* has rows for 256"):
        load_checkpoint_tokenizer(checkpoint, old | {"vocab_size": 256}, "bytes")


def test_generation_settings_of_the_first_model_stay(folder_of, tmp_path):
    tokenizer = load_tokenizer(str(folder_of("llama3")))
    stated = {"eos_token_id": [0, 3], "bos_token_id": 1, "temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    assert tokenizer_module.generation_settings(tmp_path, tokenizer) == stated
    # Ids of another tokenizer mean something else here.
    (tmp_path / "generation_config.json").write_text(json.dumps(stated | {"eos_token_id": 2}))
    settings = tokenizer_module.generation_settings(tmp_path, tokenizer)
    assert settings == stated | {"eos_token_id": 0, "bos_token_id": None}
