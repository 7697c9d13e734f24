"""Hugging Face model directories: config.json and safetensors in and out. No pickle is ever read.

Only :func:`load_weights` needs torch, so that a directory is checked before torch is imported.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open

from models.config import LlamaConfig

if TYPE_CHECKING:
    from models.llama import Llama

INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Buffers that old versions saved; they follow from the config.
OLD_BUFFERS = ("rotary_emb.inv_freq", "rope.freqs")
FLOATS = ("F64", "F32", "BF16", "F16")
COMPARE_BYTES = 1 << 26


def _few(names: Iterable[str]) -> str:
    """Some names as text, not all of a thousand."""
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _read_headers(files: Iterable[Path]) -> dict[str, tuple[Path, tuple[int, ...], str]]:
    """Name to (file, shape, dtype) of all tensors in some files; no tensor is read."""
    found = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118, it is no dict
                    if name in found:
                        raise ValueError(f"{file} holds {name}, and so does {found[name][0]}")
                    part = opened.get_slice(name)
                    found[name] = file, tuple(part.get_shape()), part.get_dtype()
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from None
    return found


def _read_index(index: Path) -> dict[str, str]:
    """Name of a tensor to the name of its file."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} cannot be read: {type(error).__name__} {error}") from None


def list_tensors(directory: Path) -> dict[str, tuple[Path, tuple[int, ...], str]]:
    """Name to (file, shape, safetensors dtype) of every tensor in a directory, from headers alone.

    The files are ``model.safetensors``, else those of ``model.safetensors.index.json``, else all
    ``*.safetensors``.

    Raises:
        ValueError: in one line, if there is no safetensors file, one cannot be read, or the index
            names a file that is missing or does not hold a tensor.
    """
    single, index = directory / "model.safetensors", directory / INDEX
    if single.is_file() or not index.is_file():
        files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
        if not files:
            pickles = sorted(p.name for p in directory.glob("*.bin"))
            hint = f"; {pickles[0]} is a pickle, and pickles are never read" if pickles else ""
            raise ValueError(
                f"{directory} holds no safetensors file{hint}: convert the weights to safetensors"
            )
        return _read_headers(files)
    named = _read_index(index)
    if absent := sorted({f for f in named.values() if not (directory / f).is_file()}):
        raise ValueError(f"{index} names {_few(absent)}, and there is no such file")
    found = _read_headers(directory / file for file in sorted(set(named.values())))
    for name, file in named.items():
        if name not in found or found[name][0] != directory / file:
            raise ValueError(f"{index} names {name} in {file}, which does not hold it")
    return found


def _raw(file: Path, name: str) -> np.ndarray:
    """The bytes of a tensor, mapped. numpy has no bfloat16, so they are not read as numbers."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        begin, end = json.loads(opened.read(size))[name]["data_offsets"]
    return np.memmap(file, np.uint8, "r", 8 + size + begin, (end - begin,))


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    starts = range(0, len(a), COMPARE_BYTES)
    return len(a) == len(b) and all(
        np.array_equal(a[i : i + COMPARE_BYTES], b[i : i + COMPARE_BYTES]) for i in starts
    )


def check_weights(directory: Path, config: LlamaConfig) -> list[str]:
    """Check that a directory holds exactly the weights of ``config``, from the headers.

    Only where embedding and head are tied and the directory holds both, their values are read.

    Returns:
        Notes for a person, a line each: what is ignored.

    Raises:
        ValueError: in one line that names the tensors and files that are wrong.
    """
    found, expected = list_tensors(directory), config.parameter_shapes
    ignored = [name for name in found if name.endswith(OLD_BUFFERS)]
    unknown = [name for name in found if name not in expected and name not in ignored]
    if missing := [name for name in expected if name not in found]:
        tied = "; --tie-word-embeddings would use the embedding" if missing == [HEAD] else ""
        raise ValueError(f"{directory}: {_few(missing)} missing{tied}")
    if config.tie_word_embeddings and HEAD in unknown:
        unknown.remove(HEAD)
        if not _same_bytes(_raw(found[HEAD][0], HEAD), _raw(found[EMBEDDING][0], EMBEDDING)):
            raise ValueError(
                f"{directory}: {HEAD} differs from {EMBEDDING}, and --tie-word-embeddings makes "
                "them one: use --no-tie-word-embeddings, or remove it from the files"
            )
    if unknown:
        raise ValueError(f"{directory}: {_few(unknown)} not known to this model")
    for name, shape in expected.items():
        _, there, dtype = found[name]
        if there != shape:
            raise ValueError(
                f"{directory}: {name} is {list(there)} there and {list(shape)} in this model: "
                "leave out the flags that change the model"
            )
        if dtype not in FLOATS:
            raise ValueError(f"{directory}: {name} is {dtype}; only {', '.join(FLOATS)} are read")
    return [f"ignored {_few(ignored)}: computed from the config"] if ignored else []


def load_weights(directory: Path, model: "Llama") -> None:
    """Fill the parameters of a materialised model in place, cast to their dtype.

    Each rank reads its own slices alone; there is no collective. Works on plain tensors and on
    DTensors with any sharding. The directory has passed :func:`check_weights`.
    """
    import torch

    from models.initialization import local_part

    files = {name: file for name, (file, _, _) in list_tensors(directory).items()}
    opened = {file: safe_open(file, framework="pt") for file in set(files.values())}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local, offset = local_part(parameter)
            if local.numel():
                where = tuple(
                    slice(start, start + size)
                    for start, size in zip(offset, local.shape, strict=True)
                )
                local.copy_(opened[files[name]].get_slice(name)[where])


def hf_config(
    config: LlamaConfig,
    *,
    seq_len: int,
    dtype: str,
    bos_token_id: int | None,
    eos_token_id: int | None,
) -> dict:
    """The config.json of ``config``, in the spellings of transformers 4 and 5.

    Args:
        seq_len: tokens per sequence of the training. A longer ``max_position_embeddings`` stays;
            where none is stated, the rotary scaling tells what it stretches to.
        dtype: of the weights, as in "bfloat16".
    """
    scaling, longest = config.rope_scaling, config.max_position_embeddings
    if scaling:
        longest = longest or int(scaling.factor * scaling.original_max_position_embeddings)
        scaling = scaling.model_dump()
    rope = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": max(seq_len, longest or 0),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
