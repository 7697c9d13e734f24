"""The safetensors of a Hugging Face directory, read with care. No pickle is ever read.

Only :func:`load_weights` needs torch, so that a directory is checked before torch is imported.
"""

import json
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open

from common.files import read_json
from common.text import printable
from models.config import LlamaConfig

if TYPE_CHECKING:
    from models.decoder import Llama

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Buffers that old versions saved; they follow from the config.
OLD_BUFFERS = ("rotary_emb.inv_freq", "rope.freqs")
FLOATS = ("F64", "F32", "BF16", "F16")
COMPARE_BYTES = 1 << 26


def few(names: Iterable[str]) -> str:
    """The first three names as text, the beginning of each that is long."""
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(printable(name[:100]) for name in names[:3]) + more


def _read_header(file: Path) -> tuple[dict[str, dict], int]:
    """What the header of a file says of each tensor, and where the bytes of the tensors begin."""
    where = printable(str(file))
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError(f"{where} is no regular file")
        # safe_open bounds the header, and checks shapes, types and offsets against each other.
        with safe_open(file, framework="numpy"), file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            tensors = json.loads(opened.read(size))
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ValueError(f"{where} cannot be read: {printable(str(error)[:300])}") from None
    tensors.pop("__metadata__", None)
    return tensors, 8 + size


def _read_headers(files: Iterable[Path]) -> dict[str, tuple[Path, tuple[int, ...], str]]:
    """Name to (file, shape, dtype) of all tensors in some files; no tensor is read."""
    tensors = {}
    for file in files:
        header, _ = _read_header(file)
        if twice := [name for name in header if name in tensors]:
            other = printable(str(tensors[twice[0]][0]))
            raise ValueError(f"{printable(str(file))} holds {few(twice)}, and so does {other}")
        tensors |= {name: (file, tuple(t["shape"]), t["dtype"]) for name, t in header.items()}
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    """Name of a tensor to the name of its file."""
    try:
        weight_map = read_json(index)["weight_map"]
        if not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError("weight_map must name a file for each tensor")
    except OSError as error:
        raise ValueError(f"{index} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"{type(error).__name__} {error}"[:300]
        raise ValueError(f"{index} cannot be read: {printable(text)}") from None
    return weight_map


def list_tensors(directory: Path) -> dict[str, tuple[Path, tuple[int, ...], str]]:
    """Name to (file, shape, safetensors dtype) of every tensor in a directory, from headers alone.

    The files are ``model.safetensors``, else those of ``model.safetensors.index.json``, else all
    ``*.safetensors``. No name in the index leads out of the directory.

    Raises:
        ValueError: in one line, if there is no safetensors file, one cannot be read, or the index
            names a file that is missing or does not hold a tensor.
    """
    try:
        names = {path.name for path in directory.iterdir() if not path.name.startswith(".")}
    except OSError as error:
        raise ValueError(f"{directory} cannot be read: {error.strerror}") from None
    if SINGLE in names or INDEX not in names:
        files = [name for name in sorted(names) if name.endswith(".safetensors")]
        if not files:
            pickles = sorted(name for name in names if name.endswith(".bin"))
            hint = f"; {few(pickles[:1])} is a pickle, and pickles are never read"
            raise ValueError(
                f"{directory} holds no safetensors file{hint if pickles else ''}: "
                "convert the weights to safetensors"
            )
        return _read_headers(directory / file for file in ([SINGLE] if SINGLE in names else files))
    index = directory / INDEX
    weight_map = _read_index(index)
    # A path that leads out of the directory is no name in it, in whatever spelling.
    if absent := sorted(set(weight_map.values()) - names):
        raise ValueError(f"{index} names {few(absent)}, and there is no such file in its directory")
    tensors = _read_headers(directory / file for file in sorted(set(weight_map.values())))
    for name, file in weight_map.items():
        if name not in tensors or tensors[name][0].name != file:
            raise ValueError(
                f"{index} names {few([name])} in {few([file])}, which does not hold it"
            )
    return tensors


def _raw(file: Path, name: str) -> np.ndarray:
    """The bytes of a tensor, mapped. numpy has no bfloat16, so they are not read as numbers."""
    header, start = _read_header(file)
    begin, end = header[name]["data_offsets"]
    return np.memmap(file, np.uint8, "r", start + begin, (end - begin,))


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
    tensors, expected = list_tensors(directory), config.parameter_shapes
    ignored = [name for name in tensors if name.endswith(OLD_BUFFERS)]
    unknown = [name for name in tensors if name not in expected and name not in ignored]
    if missing := [name for name in expected if name not in tensors]:
        tied = "; --tie-word-embeddings would use the embedding" if missing == [HEAD] else ""
        raise ValueError(f"{directory}: {few(missing)} missing{tied}")
    if config.tie_word_embeddings and HEAD in unknown:
        unknown.remove(HEAD)
        head, embedding = (_raw(tensors[name][0], name) for name in (HEAD, EMBEDDING))
        if not _same_bytes(head, embedding):
            raise ValueError(
                f"{directory}: {HEAD} differs from {EMBEDDING}, and --tie-word-embeddings makes "
                "them one: use --no-tie-word-embeddings, or remove it from the files"
            )
    if unknown:
        raise ValueError(f"{directory}: {few(unknown)} not known to this model")
    for name, shape in expected.items():
        _, actual, dtype = tensors[name]
        if actual != shape:
            raise ValueError(
                f"{directory}: {name} is {str(list(actual))[:80]} there and {list(shape)} in this "
                "model: leave out the flags that change the model"
            )
        if dtype not in FLOATS:
            raise ValueError(f"{directory}: {name} is {dtype}; only {', '.join(FLOATS)} are read")
    return [f"ignored {few(ignored)}: computed from the config"] if ignored else []


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
                part = tuple(
                    slice(start, start + size)
                    for start, size in zip(offset, local.shape, strict=True)
                )
                local.copy_(opened[files[name]].get_slice(name)[part])
