"""Write the weights of a run as a Hugging Face model directory.

    python -m recipes.export_hf runs/debug debug-hf

It holds safetensors, config.json, generation_config.json and the tokenizer, and loads with
transformers' from_pretrained: before anything is written, names and shapes are compared with
transformers' own model of that config. Only one output file is in memory at a time; torchrun with
N processes, on a file system that they share, writes N files at a time. A killed export leaves
only a hidden folder next to OUT_DIR, from which the same command goes on; one that fails, also for
a full disk, removes what it has written. Exit codes: 0 written, 1 the disk failed, 2 bad input.
"""

import argparse
import errno
import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path

from common.errors import ConfigError
from common.files import sync, write_atomic
from models.config import LlamaConfig
from models.hf import INDEX
from models.hf_config import hf_config
from parallel.launch import Launch, read_launch
from recipes.export_hf.checks import (
    LOCK,
    build_transformers_model,
    check_checkpoint,
    check_config,
    check_out,
    check_present,
    check_written,
    hold,
    is_taken,
    parse_size,
    removed_on_failure,
    resolve_out,
)
from recipes.export_hf.tokenizer import load_run_tokenizer, read_generation, write_tokenizer
from training.checkpoint.folder import DamageError, checkpoints_in, read_checkpoint_state
from training.config.command_line import Parser
from training.data.sources import one_line
from training.data.tokenizer import GENERATION
from training.run.directory import RunDir
from training.start import refuse

DTYPES = ("bfloat16", "float16", "float32", "float64")
POLL_S = 0.2


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


def find_checkpoint(path: Path) -> Path:
    """The newest complete checkpoint of a run directory, or the checkpoint that ``path`` is.

    A damaged one is passed over, and said.

    Raises:
        ConfigError: if there is none.
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


def read_identity(checkpoint: Path) -> tuple[dict, LlamaConfig]:
    """What the checkpoint's ``state.json`` says of its run, and the model in it.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        state = read_checkpoint_state(checkpoint)
        identity = state["identity"]
        fields = {key: identity[key] for key in LlamaConfig.model_fields if key in identity}
        needed = {key: identity[key] for key in ("seq_len", "dtype", "tokenizer", "vocab_size")}
        needed["tokenizer_fingerprint"] = identity.get("tokenizer_fingerprint")
        return needed | {"step": state["step"]}, LlamaConfig(**fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{checkpoint / 'state.json'} cannot be read ({type(error).__name__}: "
            f"{one_line(error)}): name another checkpoint"
        ) from None


def check_share(checkpoint: Path, launch: Launch) -> None:
    """Compare this process's share of the files of a checkpoint with their checksums.

    Raises:
        ConfigError: if one is not what was written.
    """
    from training.checkpoint import dcp_files as checkpoint_files

    try:
        checkpoint_files.check_share(checkpoint, launch.rank, launch.world_size)
    except DamageError as error:
        raise ConfigError(f"{checkpoint} is damaged ({error}): name another checkpoint") from None


def plan_files(config: LlamaConfig, dtype: str, max_shard_size: int):
    """Which tensor goes into which file: huggingface_hub's ``StateDictSplit``."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards

    with torch.device("meta"):
        kind = getattr(torch, dtype)
        tensors = {n: torch.empty(s, dtype=kind) for n, s in config.parameter_shapes.items()}
    return split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)


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
        (checkpoint / ".metadata").stat()  # DCP would log a traceback where it is gone
        reader = CheckpointReader(checkpoint)
        with warnings.catch_warnings():
            # That no_dist is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load({"model": tensors}, storage_reader=reader, **options)
    except (OSError, DamageError, CheckpointException) as error:
        if isinstance(error, CheckpointException) and error.failures:
            error = next(iter(error.failures.values()))[0]
        raise ConfigError(
            f"{checkpoint} cannot be read ({type(error).__name__}: {one_line(error)}): "
            "name another checkpoint"
        ) from None


def write_shard(checkpoint: Path, names: list[str], config: LlamaConfig, dtype: str, to: Path):
    """Read some tensors of a checkpoint, whole, and write them into one safetensors file."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shapes, kind = config.parameter_shapes, getattr(torch, dtype)
    tensors = {name: torch.empty(shapes[name], dtype=kind) for name in names}
    load_tensors(checkpoint, tensors, no_dist=True)
    if not_finite := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ConfigError(
            f"{not_finite[0]} holds values that are not finite as {dtype}: use another --dtype, or "
            "another checkpoint"
        )
    temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    try:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as error:  # what the disk said, as text
            raise OSError(errno.EIO, one_line(error), str(to)) from None
        temporary.chmod(0o644)  # safetensors lets nobody else read it
        sync(temporary)
        os.replace(temporary, to)
    finally:
        temporary.unlink(missing_ok=True)


def write_small_files(folder: Path, described: dict, generation: dict, plan) -> None:
    """Write config.json, generation_config.json, and the index where it is needed.

    Args:
        described, generation: the content of the first two.
    """
    texts = {"config.json": described, GENERATION: generation}
    if plan.is_sharded:
        texts[INDEX] = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
    for name, content in texts.items():
        write_atomic(folder / name, json.dumps(content, indent=2) + "\n")


def partial_folder(checkpoint: Path, out: Path, dtype: str, shard_size: int) -> Path:
    """The hidden folder next to ``out`` that becomes ``out`` when everything is in it.

    Its name holds a hash of what is exported and how. All processes find it without a word to each
    other, and what a killed export has left in it is of this export and need not be written again.

    Raises:
        ConfigError: if the checkpoint is not there, as when its run has just removed it.
    """
    try:
        metadata = (checkpoint / ".metadata").stat()
        state = (checkpoint / "state.json").read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{checkpoint} cannot be read ({error.strerror}): name another checkpoint"
        ) from None
    key = [state, metadata.st_mtime_ns, metadata.st_size, dtype, shard_size]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    return out.with_name(f".{out.name}.partial-{name}")


def write_share(
    checkpoint: Path, files: dict[str, list[str]], config: LlamaConfig, dtype: str, partial: Path
) -> None:
    """Write the files of one process; those that a killed export has left whole are kept."""
    try:
        for file, names in files.items():
            if not (partial / file).exists():
                write_shard(checkpoint, names, config, dtype, partial / file)
    except OSError:
        check_present(partial)
        raise


def complete(partial: Path, out: Path, config: LlamaConfig, dtype: str, plan) -> None:
    """Wait for the files of all processes, check them, and give the folder its name."""
    # A file has its name only when it is whole. If its writer fails, torchrun ends this process.
    while not all((partial / file).exists() for file in plan.filename_to_tensors):
        check_present(partial)
        time.sleep(POLL_S)
    for temporary in partial.glob(".*.tmp"):  # of killed exports
        temporary.unlink()
    check_written(partial, config, dtype, plan.tensor_to_filename)
    sync(partial)
    try:
        os.rename(partial, out)
    except OSError as error:
        raise ConfigError(
            f"OUT_DIR {out} cannot be put in place ({error.strerror}): name another one"
        ) from None
    (out / LOCK).unlink(missing_ok=True)
    sync(out.parent)


def wait_for(partial: Path, out: Path) -> bool:
    """Wait until rank 0 has checked everything; False if it has already completed ``out``."""
    while not partial.is_dir():
        if is_taken(out):
            return False
        time.sleep(POLL_S)
    return True


def export(
    path: Path,
    out: Path,
    launch: Launch,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    tokenizer_name: str | None = None,
) -> None:
    """Write this process's share of the files; rank 0 waits for all of them and completes ``out``.

    Args:
        path: a run directory, or a checkpoint.
        dtype: of the written weights; None: that of the checkpoint.
        tokenizer_name: in place of the tokenizer that the run keeps.

    Raises:
        ConfigError: in one line. OSError: from the disk.
    """
    shard_size = parse_size(max_shard_size)
    out = resolve_out(out)
    if is_taken(out):
        if launch.rank == 0:
            raise ConfigError(f"OUT_DIR {out} exists and is not empty: name another one")
        return  # rank 0 refuses it, or has already completed it
    checkpoint = find_checkpoint(path)
    identity, config = read_identity(checkpoint)
    dtype = dtype or ("float64" if identity["dtype"] == "float64" else "float32")
    partial = partial_folder(checkpoint, out, dtype, shard_size)
    if launch.rank == 0:
        check_out(out, partial, checkpoint)
    check_share(checkpoint, launch)
    plan = plan_files(config, dtype, shard_size)
    mine = list(plan.filename_to_tensors.items())[launch.rank :: launch.world_size]
    if launch.rank != 0:
        if mine and wait_for(partial, out):
            with removed_on_failure(partial):
                write_share(checkpoint, dict(mine), config, dtype, partial)
        return
    tokenizer = load_run_tokenizer(checkpoint, identity, tokenizer_name)
    generation = read_generation(checkpoint, tokenizer)
    ends = {key: generation[key] for key in ("bos_token_id", "eos_token_id")}
    described = hf_config(config, seq_len=identity["seq_len"], dtype=dtype, **ends)
    check_config(config, described)
    check_checkpoint(checkpoint, config)
    build_transformers_model(config, described)
    with hold(partial, out), removed_on_failure(partial):
        write_share(checkpoint, dict(mine), config, dtype, partial)
        write_small_files(partial, described, generation, plan)
        write_tokenizer(tokenizer, partial)
        complete(partial, out, config, dtype, plan)
    print(f"wrote step {identity['step']} of {path} as {dtype} to {out}")


def parse_command(argv: list[str]) -> argparse.Namespace:
    """The options of a command line.

    Raises:
        ConfigError: in one line. SystemExit: with 0, for --help.
    """
    parser = make_parser("export_hf", __doc__)
    add = parser.add_argument
    add("out", type=Path, metavar="OUT_DIR", help="a directory that is new or empty")
    add("--dtype", choices=DTYPES,
        help="of the written weights (default: that of the checkpoint, float32, or float64 for a "
        "float64 run)")  # fmt: skip
    add("--max-shard-size", default="5GB", metavar="SIZE",
        help="largest safetensors file, as in 500MB; one larger tensor has a file of its own "
        "(default: 5GB)")  # fmt: skip
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code, where it was not refused."""
    launch = Launch(0, 1, 0, 1)
    try:
        launch = read_launch()
        options = parse_command(sys.argv[1:] if argv is None else argv)
        export(
            options.path,
            options.out,
            launch,
            dtype=options.dtype,
            max_shard_size=options.max_shard_size,
            tokenizer_name=options.tokenizer,
        )
    except ConfigError as error:
        refuse(str(error), launch, "export_hf")
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else error
        print(f"export_hf: error: OUT_DIR {options.out} is not written ({what})", file=sys.stderr)
        return 1
    return 0
