"""Which checkpoint a start goes on from, and whether it fits. Torch-free."""

import re
from pathlib import Path

from common.errors import ConfigError
from common.text import printable
from training.checkpoint.folder import (
    CHECKPOINTS,
    DamageError,
    checkpoint_name,
    complete_checkpoints,
    newest_checkpoint,
    read_checkpoint_state,
)
from training.config.schema import Config, flag

# Of the identity: the data are compared by content once they are open, tokenizer included, which
# may have moved; the other is only for an export.
NOT_COMPARED = ("tokenizer", "max_position_embeddings")


def identity(config: Config) -> dict:
    """What makes a run the run, by flag name; a resumed one must have it in common.

    Layout, micro-batch, logging and checkpoint settings and the number of steps may change.
    """
    step = config.step
    return {
        **config.model.model_dump(mode="json"),
        "num_key_value_heads": config.model.kv_heads,
        "head_dim": config.model.head_size,
        "seq_len": step.seq_len,
        "seed": step.seed,
        "global_batch_size": step.global_batch_size,
        "dtype": step.dtype,
        **config.optimizer.model_dump(mode="json"),
        "lr_decay_steps": config.optimizer.lr_decay_steps or step.steps,
        "tokenizer": config.data.tokenizer,
    }


def check_run_dir(config: Config) -> None:
    """Raise ConfigError if ``--run-dir`` is a file."""
    if config.run_dir.is_file():
        raise ConfigError(f"--run-dir {config.run_dir} is a file: name a directory")


def find_checkpoint(config: Config) -> Path | None:
    """The checkpoint that ``--resume`` names, or the newest one whose state can be read.

    Raises:
        ConfigError: if there is none of the name, or if the folder or what is in it exists and
            cannot be read.
    """
    check_run_dir(config)
    folder = config.run_dir / CHECKPOINTS
    if not config.run.resume:
        return newest_checkpoint(folder)
    number = re.fullmatch(r"step-([0-9]{1,18})", config.run.resume)
    if not number:
        raise ConfigError(f"--resume {config.run.resume} is not of the form step-200")
    checkpoint = folder / checkpoint_name(int(number[1]))
    try:
        read_checkpoint_state(checkpoint)
    except DamageError as error:
        names = ", ".join(path.name for path in complete_checkpoints(folder)) or "none"
        raise ConfigError(
            f"--resume {config.run.resume}: {checkpoint} is not whole ({error}); "
            f"the checkpoints of this run are: {names}"
        ) from None
    return checkpoint


def check_resume(config: Config, checkpoint: Path) -> None:
    """Compare the config with the checkpoint it would continue.

    An unset ``--lr-decay-steps`` or ``--vocab-size`` takes the value of the first start.

    Raises:
        ConfigError: naming the first field that differs, and both values.
    """
    try:
        saved = read_checkpoint_state(checkpoint)["identity"]
    except DamageError as error:  # it was whole when it was found
        raise ConfigError(f"{checkpoint} was changed while it was read ({error})") from None
    for key in ("lr_decay_steps", "vocab_size"):
        value = saved.get(key)
        if value is not None and (type(value) is not int or not 0 < value < 1 << 63):
            raise ConfigError(
                f"{checkpoint} has a {key} that is no count: name another with --resume"
            )
    if config.optimizer.lr_decay_steps is None:
        config.optimizer.lr_decay_steps = saved.get("lr_decay_steps")
    if config.model.vocab_size is None:
        config.model.vocab_size = saved.get("vocab_size")
    # A checkpoint that was written before there was such a field has its default.
    saved = identity(Config()) | saved
    for key, value in identity(config).items():
        if key not in NOT_COMPARED and value != saved[key]:
            raise ConfigError(
                f"{flag(key)} {value} differs from the {printable(str(saved[key]))[:200]} of "
                f"{checkpoint}: use the same value, or another --run-dir"
            )
