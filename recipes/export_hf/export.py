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
import json
import os
import re
import sys
import time
from pathlib import Path

from common.errors import ConfigError
from common.files import sync, write_atomic
from common.text import printable
from models.config import LlamaConfig
from models.hf import INDEX
from models.hf_config import hf_config
from parallel.launch import Launch, read_launch
from recipes.export_hf.checkpoint import (
    check_checksums,
    check_parameters,
    load_tensors,
    make_parser,
    open_checkpoint,
)
from recipes.export_hf.checks import DTYPES, build_transformers_model, check_config, check_written
from recipes.export_hf.folder import (
    LOCK,
    check_out,
    check_present,
    is_taken,
    locked,
    partial_folder,
    removed_on_failure,
    resolve_out,
)
from recipes.export_hf.tokenizer import load_checkpoint_tokenizer, read_generation, write_tokenizer
from training.data.sources import one_line
from training.data.tokenizer import GENERATION
from training.start import refuse

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
POLL_S = 0.2


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


def plan_files(config: LlamaConfig, dtype: str, max_shard_size: int):
    """Which tensor goes into which file: huggingface_hub's ``StateDictSplit``."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards

    options = {"dtype": getattr(torch, dtype), "device": "meta"}
    tensors = {name: torch.empty(s, **options) for name, s in config.parameter_shapes.items()}
    return split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)


def write_shard(
    checkpoint: Path, names: list[str], config: LlamaConfig, dtype: str, file: Path
) -> None:
    """Read some tensors of a checkpoint, whole, and write them into one safetensors file."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shapes = config.parameter_shapes
    tensors = {name: torch.empty(shapes[name], dtype=getattr(torch, dtype)) for name in names}
    load_tensors(checkpoint, tensors, no_dist=True)
    if not_finite := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ConfigError(
            f"{not_finite[0]} holds values that are not finite as {dtype}: use another --dtype, or "
            "another checkpoint"
        )
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as error:  # the error of the disk, as text
            raise OSError(errno.EIO, one_line(error), str(file)) from None
        temporary.chmod(0o644)  # safetensors makes it readable for its owner alone
        sync(temporary)
        os.replace(temporary, file)
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


def write_files(
    checkpoint: Path, files: dict[str, list[str]], config: LlamaConfig, dtype: str, partial: Path
) -> None:
    """Write the files of this process that a killed export has not completed."""
    try:
        for file, names in files.items():
            if not (partial / file).exists():
                write_shard(checkpoint, names, config, dtype, partial / file)
    except OSError:
        check_present(partial)
        raise


def complete(partial: Path, out: Path, config: LlamaConfig, dtype: str, plan) -> None:
    """Wait for the files of all processes, check them, and give the folder its name."""
    # A file gets its name when it is whole. If its writer fails, torchrun ends this process.
    while not all((partial / file).exists() for file in plan.filename_to_tensors):
        check_present(partial)
        time.sleep(POLL_S)
    for temporary in partial.glob(".*.tmp"):  # left by killed exports
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
    """Wait until rank 0 has made ``partial``; False if rank 0 has already completed ``out``."""
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
    """Write the files of this process; rank 0 waits for all of them and completes ``out``.

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
    checkpoint, identity, config = open_checkpoint(path)
    dtype = dtype or ("float64" if identity["dtype"] == "float64" else "float32")
    partial = partial_folder(checkpoint, out, dtype, shard_size)
    if launch.rank == 0:
        check_out(out, partial, checkpoint)
    check_checksums(checkpoint, launch)
    plan = plan_files(config, dtype, shard_size)
    files = dict(list(plan.filename_to_tensors.items())[launch.rank :: launch.world_size])
    if launch.rank != 0:
        if files and wait_for(partial, out):
            with removed_on_failure(partial):
                write_files(checkpoint, files, config, dtype, partial)
        return
    tokenizer = load_checkpoint_tokenizer(checkpoint, identity, tokenizer_name)
    generation = read_generation(checkpoint, tokenizer)
    ends = {key: generation[key] for key in ("bos_token_id", "eos_token_id")}
    described = hf_config(config, seq_len=identity["seq_len"], dtype=dtype, **ends)
    check_config(config, described)
    check_parameters(checkpoint, config)
    build_transformers_model(config, described)
    with locked(partial, out), removed_on_failure(partial):
        write_files(checkpoint, files, config, dtype, partial)
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
    default = "that of the checkpoint, float32, or float64 for a float64 run"
    add("--dtype", choices=tuple(DTYPES), help=f"of the written weights (default: {default})")
    text = "largest safetensors file, as in 500MB; one larger tensor has a file of its own"
    add("--max-shard-size", default="5GB", metavar="SIZE", help=f"{text} (default: 5GB)")
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
        reason = f"{error.filename}: {error.strerror}" if error.filename else error
        print(f"export_hf: error: OUT_DIR {options.out} is not written ({reason})", file=sys.stderr)
        return 1
    return 0
