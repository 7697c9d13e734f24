"""The tokenizer of a run, and the copy that the run keeps of it. Torch-free."""

import json
import os
import shutil
import sys

from common.errors import ConfigError
from common.output import say
from parallel.launch import Launch
from training.config.schema import Config
from training.data.text_files import DataError
from training.data.tokenizer import (
    GENERATION,
    TOKENIZER,
    Tokenizer,
    generation_settings,
    load_tokenizer,
)
from training.run.directory import RunDir


def load_run_tokenizer(config: Config, launch: Launch) -> Tokenizer:
    """The tokenizer that ``--tokenizer`` names; if it has gone, the copy that the run keeps.

    The path in the config becomes absolute, so that it means the same in another folder.

    Raises:
        DataError: if neither can be read.
    """
    name, copy = config.data.tokenizer, RunDir(config.run_dir).tokenizer
    path = os.path.expanduser(name)
    if name != "bytes" and os.path.lexists(path):
        name = config.data.tokenizer = os.path.abspath(path)
    try:
        return load_tokenizer(name)
    except DataError as error:
        if not os.path.lexists(copy / TOKENIZER):
            raise
        if launch.rank == 0:
            say(f"train_llm.py: warning: {error}: going on with its copy in {copy}", sys.stderr)
        return load_tokenizer(str(copy))


def keep_tokenizer(config: Config, tokenizer: Tokenizer, run: RunDir) -> None:
    """Copy the files that an export needs into the run, all or none, unless they are there.

    Raises:
        OSError: from the disk. ConfigError: if a file of ``--init-from`` cannot be read.
    """
    files = dict(tokenizer.files)
    if config.init_from:
        try:
            settings = generation_settings(config.init_from, tokenizer)
        except ValueError as error:
            raise ConfigError(f"--init-from {error}") from None
        files[GENERATION] = json.dumps(settings, indent=1).encode()
    if not files or os.path.lexists(run.tokenizer):
        return
    temporary = run.tokenizer.with_name(".tokenizer.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # from a start that was killed
    temporary.mkdir()
    for name, content in files.items():
        (temporary / name).write_bytes(content)
    os.rename(temporary, run.tokenizer)
