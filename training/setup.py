"""What happens once, between the first process group and the first step."""

import contextlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from common.errors import ConfigError
from common.files import git_commit, write_atomic
from common.output import say
from common.secrets import masked
from common.text import rank_ranges
from models.decoder import Llama
from models.hf import load_weights
from models.initialization import init_weights
from parallel.grad_compression import replicate
from parallel.launch import Launch
from parallel.layout import Layout
from parallel.mesh import Ranks
from parallel.rendezvous import MeetingError, meet
from parallel.rules import check_tensor_parallel
from parallel.stages import Stage
from training.checkpoint.dcp_files import find_fault
from training.checkpoint.folder import (
    DamageError,
    checkpoints_in,
    put_aside,
    read_checkpoint_state,
    step_of,
)
from training.checkpoint.resume import check_resume, find_checkpoint, identity
from training.checkpoint.saver import Contents, remove_partial
from training.config.options import to_toml
from training.config.schema import Config, flag
from training.data.batches import TokenData, open_tokens
from training.data.tokenizer import Tokenizer
from training.data.tokens import prepare_tokens
from training.run.directory import RunDir
from training.run.launcher import report_failure
from training.run.logs import rank_logger
from training.run.tokenizer import keep_tokenizer
from training.start import launch_ids, refuse
from training.step import Engine, batch_loss

if TYPE_CHECKING:
    from parallel.pipeline import Pipeline


@dataclass(frozen=True)
class Start:
    """What the ranks of a start have in common, once they have met.

    Attributes:
        checkpoint: from which it goes on; None: from the first step.
    """

    ranks: Ranks
    run: RunDir
    checkpoint: Path | None
    data: TokenData
    tokenizer: Tokenizer


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
        ConfigError: if the vocabulary is too small, or cannot be sharded over tp.
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


def begin_run(config: Config, layout: Layout, start: Start) -> None:
    """Say in the run directory that this start runs; nothing in it has been changed before.

    What stands after the checkpoint is about to be done again: metrics are cut back, and later
    checkpoints, which are damaged or which ``--resume`` has gone behind, get other names.

    Raises:
        ConfigError: if there is no room for that.
    """
    ranks, run, checkpoint = start.ranks, start.run, start.checkpoint
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
            keep_tokenizer(config, start.tokenizer, run)
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


def run_identity(config: Config, start: Start) -> dict:
    """What a checkpoint records of its run: what a resume compares, and its tokenizer."""
    fingerprint = start.tokenizer.fingerprint
    recorded = {"data": start.data.content_key, "tokenizer_fingerprint": fingerprint}
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


def materialise(model: Llama, config: Config, ranks: Ranks, checkpoint: Path | None) -> None:
    """Give the weights memory, and their first values unless a checkpoint has them."""
    model.to_empty(device="cpu" if config.memory.cpu_offload else ranks.device)
    if not checkpoint and config.init_from:
        load_weights(config.init_from, model)
    elif not checkpoint:
        init_weights(model, config.step.seed)


def make_engine(
    config: Config, contents: Contents, layout: Layout, parts: list[Llama], stages: list[Stage]
) -> Engine:
    """What a step works with; a wrapper that compresses gradients is called in place of the model,
    and has no part in the rest.

    Args:
        parts, stages: of this rank.
    """
    pipeline = make_pipeline(config, parts, stages, layout, contents.ranks)
    called = replicate(contents.model, config.memory.grad_compression)
    return Engine(called, contents.optimizer, layout, contents.ranks, pipeline)


def make_pipeline(
    config: Config, parts: list[Llama], stages: list[Stage], layout: Layout, ranks: Ranks
) -> "Pipeline | None":
    """What runs the micro-batches through ``stages``; None without a pipeline."""
    if layout.pp == 1:
        return None
    # Imported where it is used: it takes a second.
    from parallel.pipeline import Pipeline

    loss, dtype = partial(batch_loss, ranks=ranks), getattr(torch, config.step.dtype)
    return Pipeline(parts, stages, layout, ranks, loss, seq_len=config.step.seq_len, dtype=dtype)
