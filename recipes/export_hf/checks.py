"""What an export proves before and after it writes, and how it keeps its folder to itself."""

import contextlib
import errno
import fcntl
import glob
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.text import printable
from models.config import LlamaConfig
from models.hf import list_tensors
from models.hf_config import parse_hf_config, read_hf_config
from training.data.sources import one_line

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

LOCK = ".lock"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# safetensors' names of what --dtype offers.
SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
Shapes = dict[str, tuple[int, ...]]


def parse_size(text: str) -> int:
    """The bytes in a size such as 500MB.

    Raises:
        ConfigError: if it is no size, or below one byte.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([KMGT]B)", text.strip().upper())
    size = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if not size:
        raise ConfigError(
            f"--max-shard-size {printable(text)} is no size above 0: write it as in 500MB, with "
            f"{', '.join(UNITS)}"
        )
    return size


def resolve_out(out: Path) -> Path:
    """OUT_DIR with no link in it, since the folder is put in place by a rename.

    Raises:
        ConfigError: if its links go in a circle.
    """
    try:
        return out.expanduser().resolve()
    except RuntimeError as error:
        raise ConfigError(f"OUT_DIR {out}: {one_line(error)}") from None


def is_taken(out: Path) -> bool:
    """Whether something is at ``out`` that an export would have to replace."""
    return os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir()))


def check_out(out: Path, partial: Path, checkpoint: Path) -> None:
    """Check that OUT_DIR can be made, by way of ``partial`` next to it.

    Raises:
        ConfigError: in one line.
    """
    folder = checkpoint.resolve()
    folder = folder.parent if folder.parent.name == "checkpoints" else folder
    if out.is_relative_to(folder):
        raise ConfigError(
            f"OUT_DIR {out} is among the checkpoints, which the run removes: name another one"
        )
    if os.path.ismount(out):
        raise ConfigError(f"OUT_DIR {out} is a mount point: name a folder in it")
    try:
        parent = next(folder for folder in out.parents if folder.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with contextlib.suppress(FileNotFoundError):
            partial.lstat()  # the longer of both names may be too long
    except OSError as error:
        raise ConfigError(
            f"OUT_DIR {printable(str(out))} cannot be made ({error.strerror}): name another one"
        ) from None


def _lock(folder: Path, flags: int) -> int | None:
    """A descriptor that holds the lock of a folder for this process; None if another one does."""
    fd = os.open(folder / LOCK, os.O_RDWR | flags, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The one that held it may have put the folder in place meanwhile.
        busy = not os.path.samestat(os.fstat(fd), (folder / LOCK).stat())
    except OSError as error:
        # Some cluster file systems are mounted without locks: there the last rename decides.
        busy = error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT)
    if busy:
        os.close(fd)
    return None if busy else fd


@contextlib.contextmanager
def hold(partial: Path, out: Path) -> Iterator[None]:
    """Make the folder that becomes ``out``, and keep every other export to ``out`` away.

    The lock moves with the folder; the kernel lets go of it when this process ends in any way.

    Raises:
        ConfigError: if another process is at an export to ``out``, or the folder cannot be made.
    """
    try:
        partial.mkdir(parents=True, exist_ok=True)
        fds = [_lock(partial, os.O_CREAT)]
    except OSError as error:
        raise ConfigError(
            f"OUT_DIR {out} cannot be made ({error.strerror}): name another one"
        ) from None
    # An export with other settings has another folder.
    for folder in out.parent.glob(f".{glob.escape(out.name)}.partial-*"):
        if folder != partial:
            with contextlib.suppress(FileNotFoundError):
                fds.append(_lock(folder, 0))
    try:
        if None in fds:
            if fds[0] is not None:
                discard(partial)
            raise ConfigError(
                f"OUT_DIR {out} is being written by another export: wait for it, or name "
                "another one"
            )
        yield
    finally:
        for fd in fds:
            if fd is not None:
                os.close(fd)


def discard(partial: Path) -> None:
    """Remove what a failed export has written, also while other processes still write there."""
    # Under another name no process finds it to add to it.
    doomed = partial.with_name(f"{partial.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        partial.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


@contextlib.contextmanager
def removed_on_failure(partial: Path) -> Iterator[None]:
    """Remove ``partial`` if this fails; a kill leaves it, for the same command to go on."""
    try:
        yield
    except Exception:
        discard(partial)
        raise


def check_present(partial: Path) -> None:
    """Check that no other process has taken ``partial`` away, as one does that fails.

    Raises:
        ConfigError: if it is gone.
    """
    if not partial.is_dir():
        raise ConfigError("another process of this export has failed, and says why")


def _compare(what: str, shapes: Shapes, expected: Shapes, whose: str) -> None:
    """Refuse parameters that differ, by name or shape, from the expected ones."""
    faults = [f"{name} {list(shapes[name])}" for name in shapes if name not in expected]
    faults += [f"no {name}" for name in expected if name not in shapes]
    faults += [
        f"{name} {list(shapes[name])} for {list(expected[name])}"
        for name in shapes.keys() & expected.keys()
        if shapes[name] != expected[name]
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ConfigError(
            f"{what} is not what {whose} takes: it has {printable(', '.join(faults[:3]))}{more}"
        )


def build_transformers_model(config: LlamaConfig, described: dict) -> "LlamaForCausalLM":
    """transformers' Llama of a config.json on the meta device: exactly the parameters of ours.

    Args:
        described: the content of config.json.

    Raises:
        ConfigError: if transformers refuses the config, or names or shapes differ.
    """
    import torch
    from transformers import LlamaConfig as HFConfig
    from transformers import LlamaForCausalLM

    try:
        hf = HFConfig.from_dict(described)
        with torch.device("meta"):
            model = LlamaForCausalLM(hf).to(hf.dtype)
    except Exception as error:  # its validation raises nearly every type
        raise ConfigError(
            f"transformers refuses the config of this model ({type(error).__name__}: "
            f"{' '.join(str(error).split())}): it cannot be used there"
        ) from None
    # Parameters that are tied are one object, and in the files once.
    names = {
        id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())
    }
    shapes = {name: tuple(model.state_dict()[name].shape) for name in names.values()}
    _compare("the model", config.parameter_shapes, shapes, "transformers' LlamaForCausalLM")
    return model


def check_config(config: LlamaConfig, described: dict) -> None:
    """Check that config.json says all of ``config``: a field that it does not have would be lost.

    Raises:
        ConfigError: naming the first one.
    """
    try:
        stated, assumed = parse_hf_config(described)
        read = LlamaConfig(**stated, **assumed)
    except ValueError as error:
        raise ConfigError(f"the config.json of this model cannot be read: {error}") from None
    # What follows from other fields is written out; a longest sequence may be raised.
    derived = {"num_key_value_heads": config.kv_heads, "head_dim": config.head_size}
    derived["max_position_embeddings"] = read.max_position_embeddings
    for name in LlamaConfig.model_fields:
        value = derived.get(name, getattr(config, name))
        if value != getattr(read, name):
            raise ConfigError(
                f"{name} of this model is {value} and would be {getattr(read, name)} in "
                "transformers: config.json does not say it"
            )


def check_checkpoint(checkpoint: Path, config: LlamaConfig) -> None:
    """Check that a checkpoint holds the parameters of ``config`` and no other ones.

    Raises:
        ConfigError: if it does not, or cannot be read.
    """
    from training.checkpoint.dcp_files import CheckpointReader
    from training.checkpoint.folder import DamageError

    try:
        saved = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    except DamageError as error:
        raise ConfigError(f"{checkpoint} is damaged ({error}): name another checkpoint") from None
    shapes = {
        name.removeprefix("model."): tuple(tensor.size)
        for name, tensor in saved.items()
        if name.startswith("model.")
    }
    _compare(str(checkpoint), shapes, config.parameter_shapes, "a Llama of its config")


def check_written(folder: Path, config: LlamaConfig, dtype: str, plan: dict[str, str]) -> None:
    """Check the headers and the config.json in ``folder`` against what was to be written.

    Args:
        plan: name of a tensor to the name of its file.

    Raises:
        ConfigError: if they differ.
    """
    shapes, code = config.parameter_shapes, SAFETENSORS_DTYPES[dtype]
    try:
        written = list_tensors(folder)
        read_hf_config(folder)
    except ValueError as error:
        raise ConfigError(f"what was written is damaged ({one_line(error)}): try again") from None
    expected = {name: (folder / file, shapes[name], code) for name, file in plan.items()}
    for name in expected | written:
        if written.get(name) != expected.get(name):
            raise ConfigError(
                f"what was written is damaged ({printable(name)} is {written.get(name)} and not "
                f"{expected.get(name)}): try again"
            )
