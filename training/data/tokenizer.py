"""Text → ids: one tokenizer, read from its file, for training, export and generation. Torch-free.

``tokenizer.json`` alone decides about ids. The files beside it give the names of special tokens and
nothing else.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.files import read_bounded, read_json
from common.text import shown
from training.data.text_files import DataError

TOKENIZER, CONFIG, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
GENERATION = "generation_config.json"
CHAT = "chat_template.jinja"
# Any of these files shows that there is a tokenizer, if not one that can be read here.
OTHER_FORMATS = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")
MAX_BYTES = 1 << 28
# A longer document is encoded in windows: an encoding takes about 100 bytes of memory per token
# before it becomes 2 or 4 bytes on disk.
WINDOW_CHARS = 1 << 20
# Neighbouring windows have as many characters in common, and must agree on the middle half of them.
OVERLAP_CHARS = 1 << 14

# An id, and where its characters begin and end in the text.
Token = tuple[int, int, int]


class EncodingError(ValueError):
    """A tokenizer cannot encode a text as plain text; the message says why in words."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that adds nothing by itself: no BOS, no EOS, no padding, no truncation.

    No text becomes a special token: one that spells ``<|end|>`` has the ids of these letters.

    Attributes:
        vocab_size: the largest id it can emit plus one.
        bos_id: of the token that texts of an imported model may begin with; never emitted here.
        special_ids: ids that no text may have: special tokens, but for the unknown token.
        fingerprint: a hash of what decides about ids.
        files: content of its files, by name, with the name of its EOS; none of the built-in one.
    """

    name: str
    vocab_size: int
    eos_id: int
    bos_id: int | None
    special_ids: frozenset[int]
    fingerprint: str
    backend: object = field(repr=False)  # tokenizers.Tokenizer
    files: dict[str, bytes] = field(default_factory=dict, repr=False)

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

        Windows of the text overlap. They are joined where two of them have the same tokens at the
        same places for thousands of characters to both sides: characters further away on either
        side, and an added prefix, then have no influence on these tokens.

        Raises:
            EncodingError: as :meth:`encode`, and where two windows nowhere agree.
        """
        # Where the window starts, and where the text starts that no part covers.
        start, first, parts = 0, 0, []

        def take(stop: float) -> None:
            ids = [id for id, begin, _ in tokens if first <= begin < stop]
            parts.append(np.array(ids, np.uint32))

        tokens = self._tokens(text[:WINDOW_CHARS], 0)
        while (end := start + WINDOW_CHARS) < len(text):
            start = end - OVERLAP_CHARS
            following = self._tokens(text[start : start + WINDOW_CHARS], start)
            joint = _common_boundary(tokens, following, end - OVERLAP_CHARS // 2)
            if joint is None:
                raise EncodingError(
                    f"has {len(text):,} characters, and tokens that depend on more than "
                    f"{OVERLAP_CHARS:,} of them: split it into documents of at most "
                    f"{WINDOW_CHARS:,} characters"
                )
            take(joint)
            tokens, first = following, joint
        take(math.inf)
        return np.concatenate(parts)

    def _tokens(self, text: str, offset: int) -> list[Token]:
        """The tokens of a text that begins at ``offset``, none of them special.

        Where a special token would be, the text is split inside it, so that its letters are two
        words.
        """
        encoding = self.backend.encode(text, add_special_tokens=False)
        spans = encoding.offsets
        special = [
            span for id, span in zip(encoding.ids, spans, strict=True) if id in self.special_ids
        ]
        if not special:
            pairs = zip(encoding.ids, spans, strict=True)
            return [(id, offset + begin, offset + end) for id, (begin, end) in pairs]
        bounds = [0, *(sum(span) // 2 for span in special), len(text)]
        parts = [text[a:b] for a, b in itertools.pairwise(bounds)]
        if text in parts:
            raise EncodingError(
                f"holds {text[slice(*special[0])]!r}, for which --tokenizer {self.name} has a "
                "special token alone"
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


def _common_boundary(tokens: list[Token], following: list[Token], middle: int) -> int | None:
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
        return _make(name, _byte_backend(), 256, {})
    from tokenizers import Tokenizer as Backend
    from tokenizers import processors

    files, settings = _read_files(name)
    try:
        backend = Backend.from_buffer(files[TOKENIZER])
    except BaseException as error:  # a panic of the library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise DataError(f"{_named(name)} {TOKENIZER} cannot be read ({_line(error)})") from None
    if backend.post_processor is None:
        # This template adds nothing. transformers writes it too, and the fingerprint includes it.
        backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
    eos, bos = _eos_token(name, backend, settings), _stated("bos_token", settings)[1]
    config = settings[CONFIG] | {"eos_token": settings[CONFIG].get("eos_token") or eos}
    files[CONFIG] = json.dumps(config, indent=2).encode()
    bos_id = backend.token_to_id(bos) if isinstance(bos, str) else None
    return _make(name, backend, backend.token_to_id(eos), files, bos_id)


def _named(name: str) -> str:
    return f"--tokenizer {name}:"


def _line(error: BaseException) -> str:
    """What an error says, in one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]


def _make(
    name: str, backend, eos_id: int, files: dict[str, bytes], bos_id: int | None = None
) -> Tokenizer:
    # A saved tokenizer may truncate or pad documents, or choose their ids at random.
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None
    text = backend.to_str()
    # Text that spells a special token is encoded as its letters. ``text`` does not hold this flag.
    backend.encode_special_tokens = True
    model = json.loads(text)["model"]
    unknown = model.get("unk_token")
    unknown = model.get("unk_id") if unknown is None else backend.token_to_id(unknown)
    added = backend.get_added_tokens_decoder()
    special = {id for id, token in added.items() if token.special} | {eos_id}
    return Tokenizer(
        name=name,
        vocab_size=max(eos_id, *backend.get_vocab(with_added_tokens=True).values()) + 1,
        eos_id=eos_id,
        bos_id=bos_id,
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


def _find(name: str) -> tuple[Path, str]:
    """The folder of a tokenizer, and the name of its ``tokenizer.json`` there."""
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path, TOKENIZER
    if os.path.lexists(path):
        return path.parent, path.name
    if name.startswith((".", "~", "/")) or name.count("/") > 1 or name.endswith(".json"):
        raise DataError(f"{_named(name)} cannot be loaded: there is no such file or folder")
    from huggingface_hub import snapshot_download

    wanted = [TOKENIZER, CONFIG, SPECIAL, CHAT, GENERATION, "config.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted)), TOKENIZER
    except Exception as error:  # the library raises nearly every type here
        raise DataError(
            f"{_named(name)} cannot be loaded ({_line(error)}); name a folder with {TOKENIZER}, a "
            "reachable hub name, or bytes"
        ) from None


def _read_files(name: str) -> tuple[dict[str, bytes], dict[str, dict]]:
    """By file name: the content of a tokenizer's files, and the settings in the files beside it."""
    reading, folder, files, settings = name, None, {}, {}
    try:
        folder, tokenizer = _find(name)
        for reading in (tokenizer, SPECIAL, CHAT):
            with contextlib.suppress(FileNotFoundError):
                content = read_bounded(folder / reading, MAX_BYTES)
                files[TOKENIZER if reading == tokenizer else reading] = content
        for reading in (CONFIG, SPECIAL, GENERATION, "config.json"):
            settings[reading] = {}
            with contextlib.suppress(FileNotFoundError):
                settings[reading] = read_json(folder / reading)
            if not isinstance(settings[reading], dict):
                raise ValueError("holds no JSON object")
    except (OSError, ValueError) as error:
        raise DataError(f"{_named(name)} {reading} cannot be read ({_line(error)})") from None
    if TOKENIZER not in files:
        raise DataError(
            f"{_named(name)} holds no {tokenizer}; write one with transformers: AutoTokenizer."
            f'from_pretrained("{name}").save_pretrained("DIR"), and name DIR'
        )
    return files, settings


def _stated(key: str, settings: dict[str, dict]) -> tuple[str, Any]:
    """The file that names a special token, and the name, None if none does."""
    for file in (CONFIG, SPECIAL):
        token = settings[file].get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            return file, token
    return "", None


def _eos_token(name: str, backend, settings: dict[str, dict]) -> str:
    """The token that ends a document, named beside the tokenizer, else by its id beside a model."""
    file, token = _stated("eos_token", settings)
    if token is not None:
        if not isinstance(token, str) or backend.token_to_id(token) is None:
            raise DataError(
                f"{_named(name)} eos_token {shown(token)} of {file} is no token of {TOKENIZER}"
            )
        return token
    several = ""
    for file in (GENERATION, "config.json"):
        ids = settings[file].get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        if len(ids) == 1 and type(ids[0]) is int and 0 <= ids[0] < 1 << 32:
            if token := backend.id_to_token(ids[0]):
                return token
        elif len(ids) > 1:
            several = f" of its own ({file} names {len(ids)} ids)"
    raise DataError(
        f"{_named(name)} has no EOS token{several} to separate documents; "
        f'set "eos_token" in its {CONFIG}'
    )


def generation_settings(directory: Path, tokenizer: Tokenizer) -> dict:
    """The sampling settings of a model directory, and the ids at which a text begins and ends.

    Ids that do not include the EOS of ``tokenizer`` belong to another tokenizer; BOS and EOS of
    this one replace them.

    Raises:
        ValueError: in words that follow a flag, if a file cannot be read.
    """
    settings = {}
    for file in ("config.json", GENERATION):
        try:
            content = read_json(directory / file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ValueError(f"{directory / file} cannot be read ({_line(error)})") from None
        if not isinstance(content, dict):
            raise ValueError(f"{directory / file} holds no JSON object")
        ends = ("bos_token_id", "eos_token_id")
        settings |= content if file == GENERATION else {k: content.get(k) for k in ends}
    stated = settings.get("eos_token_id")
    if tokenizer.eos_id not in (stated if isinstance(stated, list) else [stated]):
        settings |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return settings
