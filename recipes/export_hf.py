"""Write the weights of a run as a Hugging Face model directory.

    python -m recipes.export_hf runs/debug debug-hf

It holds safetensors, config.json, generation_config.json and the tokenizer, and loads with
transformers' from_pretrained. Only one output file is in memory at a time; torchrun with N
processes, on a file system that they share, writes N files at a time. A killed export leaves only
a hidden folder next to OUT_DIR, from which the same command goes on. Exit codes: 0 written, 1 the
disk failed, 2 bad input.
"""

import argparse
import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path

from models.config import LlamaConfig
from models.hf import INDEX, hf_config
from parallel.layout import Launch, LayoutError, read_launch
from training.checkpoint_dir import DamageError, check_file, read_checkpoint_state, read_sums
from training.checks import refuse
from training.command_line import Parser
from training.config import ConfigError
from training.files import sync, write_atomic
from training.output import run_command
from training.run_dir import RunDir
from training.text import one_line

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
    return parser


def find_checkpoint(path: Path) -> Path:
    """The newest complete checkpoint of a run directory, or the checkpoint that ``path`` is.

    Raises:
        ConfigError: if there is none.
    """
    if (path / "state.json").is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory: name a run directory or a checkpoint in it")
    if checkpoint := RunDir(path).newest_checkpoint():
        return checkpoint
    raise ConfigError(f"{path} holds no complete checkpoint: name a run directory that has saved")


def read_identity(checkpoint: Path) -> tuple[dict, LlamaConfig]:
    """What the checkpoint's ``state.json`` says of its run, and the model in it.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        identity = read_checkpoint_state(checkpoint)["identity"]
        fields = {key: identity[key] for key in LlamaConfig.model_fields if key in identity}
        needed = {key: identity[key] for key in ("seq_len", "dtype", "tokenizer")}
        return needed, LlamaConfig(**fields)
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
    try:
        sums = read_sums(checkpoint)
        for name in sorted(sums)[launch.rank :: launch.world_size]:
            check_file(checkpoint, name, sums)
    except DamageError as error:
        raise ConfigError(f"{checkpoint} is damaged ({error}): name another checkpoint") from None


def load_hf_tokenizer(name: str):
    """The tokenizer of a run as transformers' own, which can be saved.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from training.tokens import load_tokenizer

    ours = load_tokenizer(name)  # refuses what the training would
    if name != "bytes":
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=ours.backend,
        eos_token="<|endoftext|>",
        # No text spells EOS: its letters stay letters.
        split_special_tokens=True,
    )


def plan_files(config: LlamaConfig, dtype: str, max_shard_size: str):
    """Which tensor goes into which file: huggingface_hub's ``StateDictSplit``.

    Raises:
        ConfigError: if ``max_shard_size`` is no size.
    """
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards

    with torch.device("meta"):
        kind = getattr(torch, dtype)
        tensors = {n: torch.empty(s, dtype=kind) for n, s in config.parameter_shapes.items()}
    try:
        return split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size {max_shard_size}: {one_line(error)}") from None


def load_tensors(checkpoint: Path, tensors: dict, **options) -> None:
    """Fill tensors or DTensors, by parameter name, from a checkpoint; cast to their dtype.

    Args:
        options: of ``dcp.load``.

    Raises:
        ConfigError: if it cannot be read.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from training.checkpoint_files import CheckpointReader

    try:
        reader = CheckpointReader(checkpoint)
        with warnings.catch_warnings():
            # That no_dist is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load({"model": tensors}, storage_reader=reader, **options)
    except (OSError, CheckpointException) as error:
        if isinstance(error, CheckpointException) and error.failures:
            error = next(iter(error.failures.values()))[0]
        raise ConfigError(
            f"{checkpoint} cannot be read ({type(error).__name__}: {one_line(error)}): "
            "name another checkpoint"
        ) from None


def write_shard(checkpoint: Path, names: list[str], config: LlamaConfig, dtype: str, to: Path):
    """Read some tensors of a checkpoint, whole, and write them into one safetensors file."""
    import torch
    from safetensors.torch import save_file

    shapes, kind = config.parameter_shapes, getattr(torch, dtype)
    tensors = {name: torch.empty(shapes[name], dtype=kind) for name in names}
    load_tensors(checkpoint, tensors, no_dist=True)
    temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.chmod(0o644)  # safetensors lets nobody else read it
        sync(temporary)
        os.replace(temporary, to)
    finally:
        temporary.unlink(missing_ok=True)


def write_small_files(
    folder: Path, config: LlamaConfig, identity: dict, dtype: str, plan, tokenizer
) -> None:
    """Write config.json, generation_config.json, the index where it is needed, and the tokenizer.

    Args:
        tokenizer: from :func:`load_hf_tokenizer`.
    """
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    described = hf_config(config, seq_len=identity["seq_len"], dtype=dtype, **ends)
    texts = {"config.json": described, "generation_config.json": ends}
    if plan.is_sharded:
        texts[INDEX] = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
    for name, content in texts.items():
        write_atomic(folder / name, json.dumps(content, indent=2) + "\n")
    tokenizer.save_pretrained(folder)


def partial_folder(checkpoint: Path, out: Path, dtype: str, max_shard_size: str) -> Path:
    """The hidden folder next to ``out`` that becomes ``out`` when everything is in it.

    Its name holds a hash of what is exported and how. All processes find it without a word to each
    other, and what a killed export has left in it is of this export and need not be written again.
    """
    metadata = (checkpoint / ".metadata").stat()
    state = (checkpoint / "state.json").read_text(encoding="utf-8")
    key = [state, metadata.st_mtime_ns, metadata.st_size, dtype, max_shard_size]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    return out.with_name(f".{out.name}.partial-{name}")


def is_taken(out: Path) -> bool:
    """Whether something is at ``out`` that an export would have to replace."""
    return os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir()))


def export(
    path: Path,
    out: Path,
    launch: Launch,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Write this process's share of the files; rank 0 waits for all of them and completes ``out``.

    Args:
        path: a run directory, or a checkpoint.
        dtype: of the written weights; None: that of the checkpoint.

    Raises:
        ConfigError: in one line. OSError: from the disk.
    """
    out = out.absolute()
    if is_taken(out):
        if launch.rank == 0:
            raise ConfigError(f"OUT_DIR {out} exists and is not empty: name another one")
        return  # rank 0 refuses it, or has already completed it
    checkpoint = find_checkpoint(path)
    identity, config = read_identity(checkpoint)
    check_share(checkpoint, launch)
    dtype = dtype or ("float64" if identity["dtype"] == "float64" else "float32")
    plan = plan_files(config, dtype, max_shard_size)
    tokenizer = load_hf_tokenizer(identity["tokenizer"]) if launch.rank == 0 else None
    partial = partial_folder(checkpoint, out, dtype, max_shard_size)
    files = list(plan.filename_to_tensors)
    mine = files[launch.rank :: launch.world_size]
    if mine:
        partial.mkdir(parents=True, exist_ok=True)
    for file in mine:
        if not (partial / file).exists():
            names = plan.filename_to_tensors[file]
            write_shard(checkpoint, names, config, dtype, partial / file)
    if launch.rank != 0:
        return
    write_small_files(partial, config, identity, dtype, plan, tokenizer)
    # A file has its name only when it is whole. If its writer fails, torchrun ends this process.
    while not all((partial / file).exists() for file in files):
        time.sleep(POLL_S)
    for left in partial.glob(".*.tmp"):  # of killed exports
        left.unlink()
    sync(partial)
    os.rename(partial, out)
    sync(out.parent)
    print(f"wrote step {read_checkpoint_state(checkpoint)['step']} of {path} as {dtype} to {out}")


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
        )
    except (ConfigError, LayoutError) as error:
        refuse(str(error), launch, "export_hf")
    except OSError as error:
        print(f"export_hf: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_command(main, "export_hf")
