"""Text → ids: one tokenizer, read from its file, for training, export and generation. Torch-free.

The file is ``tokenizer.json``; what it says is what is done. The files beside it give the names of
special tokens and nothing else.
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from models.files import printable, read_bounded, read_json
from training.text_files import DataError

TOKENIZER, CONFIG, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
GENERATION = "generation_config.json"
FILES = (TOKENIZER, CONFIG, SPECIAL, "chat_template.jinja")
# Any of these says that there is a tokenizer, if not one that can be read here.
SLOW_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")
MAX_BYTES = 1 << 28
# A longer document is encoded in windows: an encoding takes about 100 bytes of memory per token
# before it becomes 2 or 4 bytes on disk.
WINDOW_CHARS = 1 << 20
# Neighbouring windows share as many characters, and must agree on half of them around the cut.
OVERLAP_CHARS = 1 << 14

# An id, and where its characters begin and end in the text.
Token = tuple[int, int, int]


class EncodingError(ValueError):
    """A text that a tokenizer cannot encode as the plain text that it is; in words."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that adds nothing by itself: no BOS, no EOS, no padding, no truncation.

    No text becomes a special token: one that spells ``<|end|>`` has the ids of these letters.

    Attributes:
        vocab_size: the largest id it can emit plus one.
        special_ids: ids that no text may have: special tokens, but for the unknown token.
        fingerprint: a hash of what decides about ids.
        files: the files that it was read from, by name; none for the built-in one.
    """

    name: str
    vocab_size: int
    eos_id: int
    special_ids: frozenset[int]
    fingerprint: str
    backend: object = field(repr=False)  # tokenizers.Tokenizer
    files: dict[str, Path] = field(default_factory=dict)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, without special tokens even where a template would add them.

        Raises:
            EncodingError: for a text that cannot be spelled without a special token.
        """
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [
            encoding.ids
            if self.special_ids.isdisjoint(encoding.ids)
            else [token[0] for token in self._tokens(text, 0)]
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def encode_long(self, text: str) -> np.ndarray:
        """The ids [N], uint32, of a text of any length, without the memory that its encoding takes.

        Windows of the text overlap. A cut is made where two of them have the same tokens at the
        same places for thousands of characters to both sides: what lies further away on either
        side, and an added prefix, then has no part in them.

        Raises:
            EncodingError: as :meth:`encode`, and where two windows nowhere agree.
        """
        start, first, parts = 0, 0, []  # of the window; of what is in no part

        def take(cut: float) -> None:
            ids = [id for id, begin, _ in tokens if first <= begin < cut]
            parts.append(np.array(ids, np.uint32))

        tokens = self._tokens(text[:WINDOW_CHARS], 0)
        while (end := start + WINDOW_CHARS) < len(text):
            start = end - OVERLAP_CHARS
            following = self._tokens(text[start : start + WINDOW_CHARS], start)
            cut = _common_cut(tokens, following, end - OVERLAP_CHARS // 2)
            if cut is None:
                raise EncodingError(
                    f"has {len(text):,} characters, and tokens that depend on more than "
                    f"{OVERLAP_CHARS:,} of them: split it into documents of at most "
                    f"{WINDOW_CHARS:,} characters"
                )
            take(cut)
            tokens, first = following, cut
        take(math.inf)
        return np.concatenate(parts)

    def _tokens(self, text: str, offset: int) -> list[Token]:
        """The tokens of a text that begins at ``offset``, none of them special.

        Where one is, the text is cut inside it, so that its letters are two words.
        """
        encoding = self.backend.encode(text, add_special_tokens=False)
        spans = encoding.offsets
        cuts = [sum(spans[i]) // 2 for i, id in enumerate(encoding.ids) if id in self.special_ids]
        if not cuts:
            pairs = zip(encoding.ids, spans, strict=True)
            return [(id, offset + begin, offset + end) for id, (begin, end) in pairs]
        bounds = [0, *cuts, len(text)]
        parts = [text[a:b] for a, b in itertools.pairwise(bounds)]
        if text in parts:
            raise EncodingError(
                f"holds {text!r}, for which --tokenizer {self.name} has a special token alone"
            )
        return [
            token
            for start, part in zip(bounds, parts, strict=False)
            if part
            for token in self._tokens(part, offset + start)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, special tokens included."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def keep(self, folder: Path) -> None:
        """Copy the files into ``folder``, which appears whole or not at all.

        Raises:
            OSError: from the disk.
        """
        if not self.files or os.path.lexists(folder):
            return
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        temporary.mkdir()
        for name, path in self.files.items():
            (temporary / name).write_bytes(read_bounded(path, MAX_BYTES))
        os.rename(temporary, folder)


def _common_cut(tokens: list[Token], following: list[Token], middle: int) -> int | None:
    """The first place from ``middle`` on where a token begins in two windows that have the same
    tokens around it; None if they differ there."""
    near, far = middle - OVERLAP_CHARS // 4, middle + OVERLAP_CHARS // 4
    here, there = (
        [token for token in window if near <= token[1] and token[2] <= far]
        for window in (tokens, following)
    )
    if not here or here != there:
        return None
    # Tokens of one character's bytes begin and end at the same place.
    pairs = itertools.pairwise(here)
    return next((b[1] for a, b in pairs if b[1] >= middle and a[1] < a[2] <= b[1] < b[2]), None)


def load_tokenizer(name: str) -> Tokenizer:
    """The built-in byte tokenizer (``bytes``), or one by folder, ``tokenizer.json`` or hub name.

    Raises:
        DataError: if it is not found, cannot be read, or has no EOS token.
    """
    if name == "bytes":
        backend = _byte_backend()
        return _make(name, backend, 256, {})
    from tokenizers import Tokenizer as Backend
    from tokenizers import processors

    files = _find_files(name)
    try:
        backend = Backend.from_buffer(read_bounded(files[TOKENIZER], MAX_BYTES))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(
            f"--tokenizer {printable(name)}: {printable(str(files[TOKENIZER]))} cannot be read "
            f"({printable(reason)})"
        ) from None
    if backend.post_processor is None:
        # It adds nothing. transformers puts it there, and it is part of the fingerprint.
        backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
    return _make(name, backend, _eos_id(name, backend, files), files)


def _make(name: str, backend, eos_id: int, files: dict[str, Path]) -> Tokenizer:
    # Settings of a saved tokenizer that would silently cut or fill documents.
    backend.no_truncation()
    backend.no_padding()
    text = backend.to_str()
    backend.encode_special_tokens = True
    added = backend.get_added_tokens_decoder()
    special = {id for id, token in added.items() if token.special} | {eos_id}
    model = json.loads(text)["model"]
    unknown = model.get("unk_token")
    unknown = model.get("unk_id") if unknown is None else backend.token_to_id(unknown)
    vocab_size = max(eos_id, *backend.get_vocab(with_added_tokens=True).values()) + 1
    return Tokenizer(
        name=name,
        vocab_size=vocab_size,
        eos_id=eos_id,
        special_ids=frozenset(special - {unknown}),
        fingerprint=hashlib.sha256(f"{eos_id} {text}".encode()).hexdigest(),
        backend=backend,
        files=files,
    )


def _byte_backend():
    """BPE without merges: byte b is id b. 256 is EOS, which no text can spell."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # ByteLevel writes printable bytes as themselves and the others, in order, as chr(256), ...
    printables = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    vocab = {chr(b if b in printables else next(others)): b for b in range(256)}
    vocab["<|endoftext|>"] = 256
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], cache_capacity=0))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _find_files(name: str) -> dict[str, Path]:
    """The files of a tokenizer by name, of which ``tokenizer.json`` is one."""
    shown = printable(name)
    path = Path(os.path.expanduser(name))
    try:
        if path.is_dir():
            folder, tokenizer = path, path / TOKENIZER
        elif os.path.lexists(path):
            folder, tokenizer = path.parent, path
        elif name.startswith((".", "~", "/")) or name.count("/") > 1 or name.endswith(".json"):
            raise DataError(f"--tokenizer {shown}: there is no such file or folder")
        else:
            folder = _download(name)
            tokenizer = folder / TOKENIZER
        there = {file: folder / file for file in (*FILES, "config.json", GENERATION)}
        there = {file: path for file, path in there.items() if os.path.lexists(path)}
    except (OSError, ValueError) as error:
        raise DataError(f"--tokenizer {shown}: {error}") from None
    if not os.path.lexists(tokenizer):
        raise DataError(
            f"--tokenizer {shown}: holds no {TOKENIZER}; write one with transformers: "
            f'AutoTokenizer.from_pretrained("{shown}").save_pretrained("DIR"), and name DIR'
        )
    return there | {TOKENIZER: tokenizer}


def _download(name: str) -> Path:
    """The folder of a hub name in the Hugging Face cache, with its small files."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[*FILES, "config.json", GENERATION]))
    except Exception as error:  # the library raises nearly every type here
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"--tokenizer {printable(name)}: cannot be loaded ({printable(reason)}); name a folder "
            f"with {TOKENIZER}, a reachable hub name, or bytes"
        ) from None


def _settings(name: str, path: Path | None) -> dict:
    if path is None:
        return {}
    try:
        settings = read_json(path)
        if not isinstance(settings, dict):
            raise ValueError("holds no JSON object")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"--tokenizer {printable(name)}: {printable(str(path))} cannot be read ({reason})"
        ) from None
    return settings


def _eos_id(name: str, backend, files: dict[str, Path]) -> int:
    """The id that ends a document: by name beside the tokenizer, else by number beside a model."""
    source = ""
    for file in (CONFIG, SPECIAL):
        token = _settings(name, files.get(file)).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            continue
        id = backend.token_to_id(token) if isinstance(token, str) else None
        if id is None:
            raise DataError(
                f"--tokenizer {printable(name)}: eos_token {printable(repr(token))} of {file} is "
                f"no token of {TOKENIZER}"
            )
        return id
    for file in (GENERATION, "config.json"):
        ids = _settings(name, files.get(file)).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if len(ids) == 1 and isinstance(ids[0], int) and backend.id_to_token(max(0, ids[0])):
            return ids[0]
        source = source or (f" ({file} has {printable(repr(ids))})" if ids else "")
    raise DataError(
        f"--tokenizer {printable(name)}: has no EOS token to separate documents{source}; "
        f'set "eos_token" in its {CONFIG}'
    )
