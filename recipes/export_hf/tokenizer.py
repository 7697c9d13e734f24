"""The tokenizer of a checkpoint, for an export and for generation."""

import json
import os
from pathlib import Path

from common.errors import ConfigError
from common.files import read_json
from common.text import printable
from training.data.sources import one_line
from training.data.tokenizer import (
    CONFIG,
    GENERATION,
    SPECIAL,
    TOKENIZER,
    Tokenizer,
    load_tokenizer,
)
from training.run.directory import RunDir

# Keys of tokenizer_config.json by which transformers changes what the file says, or runs code.
REBUILT = ("add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder")
REBUILT += ("additional_special_tokens", "auto_map", "extra_special_tokens")


def _run_copy(checkpoint: Path) -> Path:
    """The folder of the tokenizer that the run of a checkpoint keeps."""
    return RunDir(checkpoint.absolute().parent.parent).tokenizer


def load_checkpoint_tokenizer(checkpoint: Path, identity: dict, name: str | None) -> Tokenizer:
    """The tokenizer that a checkpoint was trained with.

    Args:
        name: of the tokenizer; None: the copy that the run keeps, or the name in the checkpoint.

    Raises:
        ConfigError: if it cannot be loaded, or gives other ids than those of the training.
    """
    if name is None:
        copy = _run_copy(checkpoint)
        name = str(copy) if os.path.lexists(copy / TOKENIZER) else identity["tokenizer"]
    tokenizer = load_tokenizer(name)
    if identity["tokenizer_fingerprint"] not in (None, tokenizer.fingerprint):
        raise ConfigError(
            f"--tokenizer {printable(name)} gives other ids than the tokenizer that {checkpoint} "
            "was trained with: name that one"
        )
    if tokenizer.vocab_size > identity["vocab_size"]:
        raise ConfigError(
            f"--tokenizer {printable(name)} has {tokenizer.vocab_size} ids, and the model in "
            f"{checkpoint} has rows for {identity['vocab_size']}: name that of the training"
        )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer so that transformers has the ids of its file; the file is copied as it is.

    The class that is named is PreTrainedTokenizerFast: those named after models rebuild what the
    file says.
    """
    if tokenizer.name == "bytes":
        from transformers import PreTrainedTokenizerFast

        # No text spells EOS: its letters stay letters.
        options = {"eos_token": "<|endoftext|>", "split_special_tokens": True}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, **options).save_pretrained(
            folder
        )
        return
    files = dict(tokenizer.files)
    stated = json.loads(files.pop(SPECIAL, b"{}")) | json.loads(files[CONFIG])
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, value in stated.items():
        if key in REBUILT:
            continue
        if key.endswith("_token"):
            # transformers 5 takes no objects here, and would add a token that the file lacks.
            value = value.get("content") if isinstance(value, dict) else value
            if not isinstance(value, str) or tokenizer.backend.token_to_id(value) is None:
                continue
        config.setdefault(key, value)
    files[CONFIG] = json.dumps(config, indent=2).encode()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def read_generation(checkpoint: Path, tokenizer: Tokenizer) -> dict:
    """generation_config.json of a run: that of --init-from, else the EOS of its documents alone.

    Documents are separated by EOS and begin without BOS, so the file names no BOS.

    Raises:
        ConfigError: if the run's copy cannot be read.
    """
    file = _run_copy(checkpoint) / GENERATION
    try:
        settings = dict(read_json(file))
    except FileNotFoundError:
        settings = {}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({one_line(error)}): remove or mend it") from None
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_id}
    return ends | {key: value for key, value in settings.items() if value is not None}
