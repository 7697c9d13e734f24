"""What happens once between the first process group and the first step, and after the last."""

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from common.errors import ConfigError
from common.files import REPO, write_atomic
from common.output import say
from common.secrets import masked
from common.text import rank_ranges
from models.decoder import Llama
from parallel import parallelize
from parallel.launch import Launch
from parallel.layout import Layout
from parallel.mesh import Ranks, make_mesh
from parallel.rendezvous import MeetingError, meet
from parallel.rules import check_tensor_parallel
from parallel.stages import Stage
from planner.collectives import collectives, describe_pipeline, format_plan, parameter_rows
from planner.machine import load_machine, table_name
from planner.prediction import Prediction, predict
from training.checkpoint.dcp_files import find_fault
from training.checkpoint.folder import (
    DamageError,
    checkpoints_in,
    put_aside,
    read_checkpoint_state,
    step_of,
)
from training.checkpoint.resume import check_resume, find_checkpoint, identity
from training.checkpoint.saver import remove_partial
from training.config.schema import Config, flag, to_toml
from training.data.batches import TokenData, open_tokens
from training.data.tokenizer import Tokenizer, load_tokenizer
from training.data.tokens import prepare_tokens
from training.run.directory import RunDir
from training.run.launcher import report_failure
from training.run.logs import rank_logger
from training.run.tokenizer import keep_tokenizer
from training.start import launch_ids, refuse
from training.step import batch_loss

if TYPE_CHECKING:
    from parallel.pipeline import Pipeline


@contextlib.contextmanager
def refusing(launch: Launch) -> Iterator[None]:
    """Turn bad input that is found in this block into one line and exit code 2.

    Ranks that do not come together are exit code 1: another attempt may have them all.
    """
    try:
        yield
    except ConfigError as error:
        refuse(str(error), launch)
    except DamageError as error:  # it was whole when it was found
        refuse(f"the checkpoint was changed while it was read ({error})", launch)
    except MeetingError as error:
        if str(error):
            report_failure(str(error))
            say(f"train_llm.py: error: {error}", sys.stderr)
        os._exit(1)


def resolve_vocabulary(config: Config, layout: Layout, tokenizer: Tokenizer) -> None:
    """Set an unset vocabulary to the tokenizer's, and check that every token has a row.

    Raises:
        ConfigError: if the vocabulary is too small, or cannot be cut over tp.
    """
    model = config.model
    if model.vocab_size is None:
        model.vocab_size = tokenizer.vocab_size
    if model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {model.vocab_size} has no row for token {tokenizer.vocab_size - 1} of "
            f"--tokenizer {tokenizer.name}: use --vocab-size {tokenizer.vocab_size} or more"
        )
    check_tensor_parallel(model, layout, config.step.seq_len, sequence_parallel=False)


def meet_ranks(config: Config, launch: Launch) -> dist.Store:
    """Come together with the other ranks, all started alike; the store that they share.

    Compared before any process group is built, since it is the settings that shape the groups.

    Raises:
        LayoutError: on all ranks, naming the first flag in which one differs, as where nodes hold
            different recipes.
        MeetingError: if one does not come within ``--comm-timeout``.
    """

    def differs(settings: str) -> str | None:
        first = json.loads(settings)
        # What rank 0 read from a checkpoint; only there is it known whether a restarted launch had
        # begun.
        config.optimizer.lr_decay_steps = first["optimizer"]["lr_decay_steps"]
        config.model.vocab_size = first["model"]["vocab_size"]
        config.run.resume = first["run"]["resume"]
        here, there = (_by_flag(dump) for dump in (config.model_dump(mode="json"), first))
        for name in here | there:
            mine, other = here.get(name, "unknown"), there.get(name, "unknown")
            if mine != other:
                return (
                    f"{name} is {mine} here and {other} on rank 0: "
                    "use the same command and recipe on all nodes"
                )
        return None

    settings = json.dumps(config.model_dump(mode="json"))
    return meet(launch, config.run.comm_timeout, settings, differs)


def _by_flag(dump: dict) -> dict:
    """The values of a config by flag."""
    return {
        flag(key): value
        for table, values in dump.items()
        for key, value in (values if isinstance(values, dict) else {table: values}).items()
    }


def from_leader(ranks: Ranks, key: str, leader: int, make: Callable[[], dict]) -> dict:
    """Run ``make`` on rank ``leader`` and give its JSON-able result to the ranks that ask.

    The others poll the store: unlike a collective this has no timeout, so that tokenising may
    take hours.

    Raises:
        ConfigError: on every rank that asks, if ``make`` raises it.
    """
    key = f"{key}/{leader}"
    if ranks.rank == leader:
        try:
            result = make()
        except ConfigError as error:
            ranks.store.set(key, json.dumps({"error": str(error)}))
            raise
        ranks.store.set(key, json.dumps(result))
        return result
    while not ranks.store.check([key]):
        time.sleep(0.1)
    result = json.loads(ranks.store.get(key))
    if "error" in result:
        raise ConfigError(result["error"])
    return result


def open_run(config: Config, ranks: Ranks) -> tuple[RunDir, Path | None]:
    """Take the run directory, and the newest whole checkpoint in it, the same on all ranks.

    A damaged one is passed over and said, unless ``--resume`` names it.

    Raises:
        ConfigError: if another job holds the directory, it is not writable, or there are
            checkpoints but none is whole.
    """
    run = RunDir(config.run_dir)

    def take() -> dict:
        run.lock()
        run.check_readable()
        remove_partial(run.checkpoints)
        names = [path.name for path in reversed(checkpoints_in(run.checkpoints))]
        if config.run.resume:
            names = [find_checkpoint(config).name]
        return {"checkpoints": names}

    first = from_leader(ranks, "run", 0, take)
    if ranks.rank:
        run.join()
    faults = []
    for name in first["checkpoints"]:
        checkpoint = run.checkpoints / name
        fault = find_fault(checkpoint, ranks)
        if fault is None:
            check_resume(config, checkpoint)
            return run, checkpoint
        faults.append(f"{name}: {fault}")
        if ranks.rank == 0 and not config.run.resume:
            print(f"train_llm.py: warning: {checkpoint} is damaged: {fault}", file=sys.stderr)
    if faults:
        raise ConfigError(
            f"--run-dir {config.run_dir} holds no whole checkpoint to go on from "
            f"({'; '.join(faults)}): repair one, name another with --resume, or another --run-dir"
        )
    return run, None


def begin_run(
    config: Config,
    layout: Layout,
    ranks: Ranks,
    run: RunDir,
    checkpoint: Path | None,
    tokenizer: Tokenizer,
) -> None:
    """Say in the run directory that this start runs; nothing in it has been changed before.

    What stands after the checkpoint is about to be done again: metrics are cut back, and later
    checkpoints, which are damaged or which ``--resume`` has gone behind, get other names.

    Raises:
        ConfigError: if there is no room for that.
    """
    hosts = [""] * layout.world_size
    if ranks.rank == 0:
        # The others cannot fail before rank 0 has joined the collective below.
        with contextlib.suppress(OSError):
            run.put_diagnosis_aside()
    dist.all_gather_object(hosts, socket.gethostname(), group=ranks.control)
    if ranks.rank == 0:
        try:
            done = step_of(checkpoint.name) if checkpoint else 0
            if checkpoint is None:
                if run.has_logged():
                    text = f"{run.path} has metrics and no checkpoint: training begins anew"
                    say(f"train_llm.py: warning: {text}", sys.stderr)
                write_atomic(run.config_toml, to_toml(config))
            else:
                for path in checkpoints_in(run.checkpoints):
                    if step_of(path.name) > done:
                        aside = put_aside(path, "unused")
                        print(f"train_llm.py: {path} is now {aside.name}", file=sys.stderr)
            run.cut_metrics(done)
            keep_tokenizer(config, tokenizer, run)
            run.write_status("running")
            run.record_start(_start_record(layout, ranks, hosts))
        except OSError as error:
            raise ConfigError(
                f"--run-dir {config.run_dir} cannot be written ({error.strerror}): make room, or "
                "name another directory"
            ) from None
    rank_logger(run.log_file(ranks.rank), ranks.rank).info(
        "started on %s as %s", socket.gethostname(), ranks.device
    )


def git_commit() -> str | None:
    """The commit that this code is of; None where it is in no repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        here = ["git", "-C", str(REPO), "rev-parse", "HEAD"]
        words = {"capture_output": True, "text": True, "check": True, "timeout": 30}
        return subprocess.run(here, **words).stdout.strip()
    return None


def _start_record(layout: Layout, ranks: Ranks, hosts: list[str]) -> dict:
    on = {host: [r for r, at in enumerate(hosts) if at == host] for host in sorted(set(hosts))}
    return {
        "time": time.time(),
        "layout": layout.name,
        "world_size": layout.world_size,
        "device": torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu",
        "hosts": {host: rank_ranges(here) for host, here in on.items()},
        "python": platform.python_version(),
        "versions": {
            name: version(name) for name in ("torch", "numpy", "datasets", "transformers")
        },
        "git_commit": git_commit(),
        "command": [masked(word) for word in sys.argv],
        "launch": launch_ids(),
    }


def open_data(config: Config, tokenizer: Tokenizer, ranks: Ranks) -> TokenData:
    """Tokenise once per node, or find it done, and map the tokens.

    Raises:
        ConfigError: for bad records, or if the nodes hold different text.
    """

    def log(text: str) -> None:
        if ranks.rank == 0:
            say(text, sys.stdout)

    def prepare() -> dict:
        folder = prepare_tokens(config.data, tokenizer, log=log)
        data = open_tokens(folder, config.step.seq_len)
        return {"folder": str(folder), "content": data.content_key}

    leader = ranks.rank - ranks.launch.local_rank
    mine = from_leader(ranks, "data", leader, prepare)
    first = from_leader(ranks, "data", 0, prepare) if leader else mine
    if mine["content"] != first["content"]:
        raise ConfigError(
            f"--dataset {config.data.dataset} holds other text here than on the node of rank 0: "
            "use the same files (and Python version, for stdlib) on all nodes"
        )
    return open_tokens(Path(mine["folder"]), config.step.seq_len)


def run_identity(config: Config, data: TokenData, tokenizer: Tokenizer) -> dict:
    """What a checkpoint records of its run: what a resume compares, and its tokenizer."""
    recorded = {"data": data.content_key, "tokenizer_fingerprint": tokenizer.fingerprint}
    return identity(config) | recorded


def check_data(config: Config, data: TokenData, checkpoint: Path | None) -> None:
    """Check that the text is that of the checkpoint.

    Raises:
        ConfigError: if it is not.
    """
    if checkpoint and read_checkpoint_state(checkpoint)["identity"].get("data") != data.content_key:
        raise ConfigError(
            f"--dataset {config.data.dataset} gives other tokens than {checkpoint} was trained on: "
            "use the same data, --tokenizer and --eval-fraction, or another --run-dir"
        )


def parameter_dtype(config: Config) -> torch.dtype:
    """Stored dtype of parameters and moments: float32 also under a bfloat16 compute dtype."""
    return torch.promote_types(getattr(torch, config.step.dtype), torch.float32)


def make_pipeline(
    config: Config, parts: list[Llama], stages: list[Stage], layout: Layout, ranks: Ranks
) -> "Pipeline | None":
    """What runs the micro-batches through ``stages``; None without a pipeline."""
    if layout.pp == 1:
        return None
    # Imported where it is used: it takes a second.
    from parallel.pipeline import Pipeline

    return Pipeline(
        parts, stages, layout, ranks, partial(batch_loss, ranks=ranks),
        seq_len=config.step.seq_len, dtype=getattr(torch, config.step.dtype),
    )  # fmt: skip


def parallel_options(config: Config, ranks: Ranks) -> dict:
    """The config's, as options of :func:`parallel.parallelize`."""
    options = config.plan_options(cuda=ranks.device.type == "cuda")
    return options | {"dtype": getattr(torch, config.step.dtype)}


def print_plan(config: Config, layout: Layout, launch: Launch) -> None:
    """Print what rank 0 would hold and send under ``layout``. One process stands for all ranks.

    Of a pipeline, also what ranks of the second and the last coordinate send.
    """
    if launch.rank != 0:
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with refusing(launch):
        if config.model.vocab_size is None:
            resolve_vocabulary(config, layout, load_tokenizer(config.data.tokenizer))
    dist.init_process_group("fake", rank=0, world_size=layout.world_size, store=FakeStore())
    ranks = Ranks(launch, torch.device("cpu"), make_mesh("cpu", layout), None, None)
    options, seq_len = config.plan_options(cuda=False), config.step.seq_len
    with torch.device("meta"):
        model = Llama(config.model).to(parameter_dtype(config))
    shown = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    stages = {i: layout.rank_stages(config.model, seq_len, i) for i in shown}
    laid_out = parallel_options(config, ranks)
    parallelize(model, ranks.mesh, zero=layout.zero, stages=stages[0], **laid_out)
    sent = {
        i: collectives(config.model, layout, stages=stages[i], seq_len=seq_len, **options)
        for i in shown
    }
    print(format_plan(parameter_rows(model), sent, config.model, layout, seq_len))
    print(f"\n{predict(config, layout, None, cuda=False).lines()[0]}")
    dist.destroy_process_group()


def predict_run(config: Config, layout: Layout, device: torch.device) -> Prediction:
    """What the planner says of the run; the table of GPUs is of bfloat16."""
    cuda, dtype, file = device.type == "cuda", config.step.dtype, config.run.calibration
    name = torch.cuda.get_device_name(device) if cuda else "a CPU"
    machine = None
    unknown = (
        f"{name} in {dtype} is not in the table of GPUs (recipes.plan --calibrate measures it)"
    )
    if file:
        machine = load_machine("", file)
        if machine.dtype not in (None, dtype):
            machine, unknown = None, f"{file} is of {machine.dtype}, and this is {dtype}"
    elif cuda and dtype == "bfloat16" and (gpu := table_name(name)):
        machine = load_machine(gpu)
    return predict(config, layout, machine, cuda=cuda, unknown=unknown)


def describe(
    config: Config,
    layout: Layout,
    ranks: Ranks,
    checkpoint: Path | None,
    prediction: Prediction,
) -> list[str]:
    """What a person wants to see before the first step, a line each."""
    step, model, options = config.step, config.model, parallel_options(config, ranks)
    cuda = ranks.device.type == "cuda"
    device = f"{torch.cuda.get_device_name()}, nccl" if cuda else "CPU, gloo"
    sizes = {
        "pp": layout.pp, "dp-replicate": layout.dp_replicate, "dp": layout.dp, "cp": layout.cp,
        "tp": layout.tp,
    }  # fmt: skip
    dims = " x ".join(
        f"{name} {size}" for name, size in sizes.items() if size > 1 or name in ("dp", "tp")
    )
    lines = [
        f"layout {layout.name}: {dims} on {layout.world_size} processes ({device}), "
        f"ZeRO-{layout.zero}, "
        f"sequence parallel {'on' if options['sequence_parallel'] else 'off'}",
        f"model {model.num_parameters:,} parameters, vocabulary {model.vocab_size}, {step.dtype}",
        f"batch {step.global_batch_size} sequences of {step.seq_len} tokens a step = "
        f"dp {layout.data_ranks} x {layout.micro_batches} micro-batches x {layout.batch_size} "
        "sequences",
    ]
    if layout.pp > 1:
        lines.append(describe_pipeline(layout))
    compression = config.memory.grad_compression
    if compression != "none" and layout.world_size > 1:
        lines.append(f"gradients are sent as {compression}, which loses digits")
    if checkpoint:
        lines.append(f"resumed from {checkpoint}")
        if compression == "powersgd" and layout.world_size > 1:
            lines.append(
                "what PowerSGD had kept back is not in a checkpoint: its error feedback begins at "
                "zero, and this run differs a little from one that was not stopped"
            )
    elif config.init_from:
        lines.append(f"initial weights from {config.init_from}")
    return [*lines, *prediction.lines()]
