"""The checkpoint that a command reads: which one, whether it is whole, and what is in it."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from common.errors import ConfigError
from models.config import LlamaConfig
from parallel.launch import Launch
from recipes.export_hf.checks import compare_shapes
from training.checkpoint.folder import DamageError, checkpoints_in, read_checkpoint_state
from training.config.command_line import Parser
from training.data.sources import one_line
from training.run.directory import RunDir


def make_parser(name: str, description: str) -> Parser:
    """The parser of a command of recipes/ about a run or a checkpoint."""
    parser = Parser(prog=f"python -m recipes.{name}", description=description)
    parser.add_argument(
        "path",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="a run directory (its newest checkpoint is taken), or a checkpoint",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="the tokenizer of the run, if it is not where it was (default: the copy that the run "
        "keeps)",
    )
    return parser


def _find_checkpoint(path: Path) -> Path:
    """The newest complete checkpoint of a run directory, or the checkpoint that ``path`` is.

    A damaged one is passed over with a warning.
    """
    if os.path.lexists(path / "state.json"):
        return path
    if not os.path.isdir(path):
        raise ConfigError(f"{path} is no directory: name a run directory or a checkpoint in it")
    for checkpoint in reversed(checkpoints_in(RunDir(path).checkpoints)):
        try:
            read_checkpoint_state(checkpoint)
            return checkpoint
        except DamageError as error:
            print(f"warning: {checkpoint} is damaged ({error}) and passed over", file=sys.stderr)
    raise ConfigError(f"{path} holds no complete checkpoint: name a run directory that has saved")


def _unreadable(path: Path, error: BaseException) -> ConfigError:
    reason = f"{type(error).__name__}: {one_line(error)}"
    return ConfigError(f"{path} cannot be read ({reason}): name another checkpoint")


def open_checkpoint(path: Path) -> tuple[Path, dict, LlamaConfig]:
    """The checkpoint of a run or at a path, what its ``state.json`` says of its run, and its model.

    Raises:
        ConfigError: if there is none, or it cannot be read.
    """
    checkpoint = _find_checkpoint(path)
    try:
        state = read_checkpoint_state(checkpoint)
        identity = state["identity"]
        fields = {key: identity[key] for key in LlamaConfig.model_fields if key in identity}
        needed = {key: identity[key] for key in ("seq_len", "dtype", "tokenizer", "vocab_size")}
        needed["tokenizer_fingerprint"] = identity.get("tokenizer_fingerprint")
        return checkpoint, needed | {"step": state["step"]}, LlamaConfig(**fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(checkpoint / "state.json", error) from None


@contextlib.contextmanager
def _damage_refused(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except DamageError as error:
        raise ConfigError(f"{checkpoint} is damaged ({error}): name another checkpoint") from None


def check_checksums(checkpoint: Path, launch: Launch) -> None:
    """Compare the files of a checkpoint with their checksums, each on one of the processes.

    Raises:
        ConfigError: if one is not what was written.
    """
    from training.checkpoint.dcp_files import check_share

    with _damage_refused(checkpoint):
        check_share(checkpoint, launch.rank, launch.world_size)


def check_parameters(checkpoint: Path, config: LlamaConfig) -> None:
    """Check that a checkpoint holds the parameters of ``config`` and no other ones.

    Raises:
        ConfigError: if it does not, or cannot be read.
    """
    from training.checkpoint.dcp_files import CheckpointReader

    with _damage_refused(checkpoint):
        saved = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    shapes = {
        name.removeprefix("model."): tuple(tensor.size)
        for name, tensor in saved.items()
        if name.startswith("model.")
    }
    compare_shapes(str(checkpoint), shapes, config.parameter_shapes, "a Llama of its config")


def load_tensors(checkpoint: Path, tensors: dict, **options) -> None:
    """Fill tensors or DTensors, by parameter name, from a checkpoint; cast to their dtype.

    Args:
        options: of ``dcp.load``.

    Raises:
        ConfigError: if it cannot be read.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from training.checkpoint.dcp_files import CheckpointReader

    try:
        (checkpoint / ".metadata").stat()  # without this file DCP would log a traceback
        reader = CheckpointReader(checkpoint)
        with warnings.catch_warnings():
            # Of a load without a process group, which is intended.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load({"model": tensors}, storage_reader=reader, **options)
    except (OSError, DamageError, CheckpointException) as error:
        if isinstance(error, CheckpointException) and error.failures:
            error = next(iter(error.failures.values()))[0]
        raise _unreadable(checkpoint, error) from None
