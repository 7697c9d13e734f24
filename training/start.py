"""Everything that can be known to be wrong before a process group is built. Torch-free."""

import contextlib
import os
import socket
import sys
import time
from pathlib import Path

from common.errors import ConfigError
from common.text import printable
from models.hf import check_weights
from parallel.launch import Launch, read_launch
from parallel.layout import Layout
from parallel.rules import check_grad_compression, check_pipeline, check_tensor_parallel
from planner.machine import load_machine
from training.checkpoint.folder import (
    step_of,
)
from training.checkpoint.resume import check_resume, check_run_dir, find_checkpoint
from training.config.checks import check_optimizer
from training.config.command_line import parse_flags
from training.config.options import config_layout
from training.config.schema import Config
from training.data.text_files import check_source
from training.run.directory import RunDir
from training.run.launcher import report_failure
from training.run.wandb_run import WandbRun, wandb_mode

# Set where a launcher starts the same command again: it is to go on, not to begin anew.
RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def check(config: Config, launch: Launch) -> Layout:
    """Check all that can be known from the flags, and arrange the layout.

    Raises:
        ConfigError: in one line.
    """
    step, run = config.step, config.run
    if config.layout.world_size and not config.layout.print_plan:
        raise ConfigError(
            f"--world-size {config.layout.world_size} plans only: add --print-plan, "
            "or start that many processes with torchrun"
        )
    if error := config.model.architecture_error():
        raise ConfigError(error)
    if (tokens := step.steps * step.global_batch_size * step.seq_len) >= 2**63:
        raise ConfigError(
            f"--steps {step.steps} of --global-batch-size {step.global_batch_size} and --seq-len "
            f"{step.seq_len} are {tokens:.1e} tokens, which 64 bits do not count: use fewer"
        )
    layout = config_layout(config, config.layout.world_size or launch.world_size)
    memory = config.memory
    check_pipeline(config.model, layout, memory.activation_checkpoint, memory.compile)
    sequence_parallel = config.layout.sequence_parallel == "on"
    check_tensor_parallel(config.model, layout, step.seq_len, sequence_parallel)
    check_optimizer(config)
    check_grad_compression(
        memory.grad_compression,
        config.model,
        layout,
        prefetch=memory.prefetch,
        cpu_offload=memory.cpu_offload,
    )
    if launch.rank == 0:
        wandb_mode(run.wandb)
        check_source(config.data)
    # A checkpoint beats --init-from, whose weights are then not read.
    if launch.rank == 0 and config.init_from and not RunDir(config.run_dir).newest_checkpoint():
        _check_init_from(config)
    if run.calibration:
        load_machine("", run.calibration)
    check_run_dir(config)
    return layout


def with_vocabulary(config: Config) -> Config:
    """``config``, with the vocabulary of its tokenizer if none is set."""
    if config.model.vocab_size is None:
        from training.data.tokenizer import load_tokenizer

        config.model.vocab_size = load_tokenizer(config.data.tokenizer).vocab_size
    return config


def check_ahead(config: Config, launch: Launch) -> Layout:
    """Check a run that is yet to be launched, with the vocabulary of its tokenizer if none is set.

    Raises:
        ConfigError: in one line.
    """
    return check(with_vocabulary(config.model_copy(deep=True)), launch)


def _check_init_from(config: Config) -> None:
    try:
        notes = check_weights(config.init_from, config.model)
    except ValueError as error:
        raise ConfigError(f"--init-from {error}") from None
    for note in notes:
        print(f"--init-from {config.init_from}: {note}", file=sys.stderr)


def refuse(message: str, launch: Launch, program: str = "train_llm.py") -> None:
    """End this process with exit code 2 and one line on stderr, printed by rank 0 alone.

    torchrun ends all ranks as soon as one has left, so the others wait to be ended. A rank that is
    first on another node speaks up if nobody ended it: only its node knows what is wrong.
    """
    if message:
        report_failure(message)
    if launch.rank != 0:
        time.sleep(10)
        message = f"rank {launch.rank} on {socket.gethostname()}: {message}"
    if launch.local_rank == 0:
        print(f"{program}: error: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Not sys.exit: other threads and exit handlers must not delay the end.
    os._exit(2)


def launch_ids() -> list[str]:
    """What a restart by Slurm, and one by torchrun, has in common with the first attempt."""
    job, run = os.environ.get("SLURM_JOB_ID", "none"), os.environ.get("TORCHELASTIC_RUN_ID", "none")
    # torchrun makes an id of its own with --standalone alone; else the parent process is one.
    return [
        f"job {job}",
        f"run {run}" if run != "none" else f"process {os.getppid()} on {socket.gethostname()}",
    ]


def _note_finished(config: Config, step: int) -> None:
    """Do what a run that was killed after its last checkpoint did not come to: status and wandb."""
    run = RunDir(config.run_dir)
    # Held by another job, which still ends, or not writable: then it stays as it is.
    with contextlib.suppress(ConfigError, OSError):
        if (run.read_status() or {}).get("state") in ("running", "failed"):
            run.lock()
            # Opening it fills in what it lacks.
            WandbRun(run, config.run, config.model_dump(mode="json"), print).close(exit_code=0)
            run.write_status("finished", step=step)
    run.unlock()


def bare_launch() -> Launch:
    """This process before the launcher's variables are checked: enough to say who refuses."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    rank = int(rank) if rank.isdecimal() else 0
    return Launch(rank, 1, rank, 1)


def read_config(
    argv: list[str], program: str = "train_llm.py"
) -> tuple[Config, Layout, Launch, Path | None]:
    """The checked config, layout and launch of this process, and the checkpoint it would load.

    Bad input ends it with exit code 2.
    """
    launch = bare_launch()
    try:
        launch = read_launch()
        config = parse_flags(argv, console=launch.rank == 0)
        # Unless the first attempt ended before it had gone back to the checkpoint that is named.
        for name, launched in zip(RESTARTS, launch_ids(), strict=True):
            restarted = os.environ.get(name) or "0"
            if not restarted.isdecimal():
                raise ConfigError(f"{name}={printable(restarted)} is no number of restarts")
            if int(restarted) and RunDir(config.run_dir).begun_by(launched):
                config.run.resume = None
        checkpoint = None if config.layout.print_plan else find_checkpoint(config)
        if checkpoint:
            check_resume(config, checkpoint)
        layout = check(config, launch)
    except ConfigError as error:
        refuse(str(error), launch, program)
    return config, layout, launch, checkpoint


def load_config(argv: list[str]) -> tuple[Config, Layout, Launch]:
    """The checked config, layout and launch of this process.

    Bad input ends it with exit code 2, and a run that has finished with exit code 0.
    """
    config, layout, launch, checkpoint = read_config(argv)
    if checkpoint:
        done = step_of(checkpoint.name)
        if done >= config.step.steps:
            if launch.rank == 0:
                _note_finished(config, done)
                print(
                    f"{config.run_dir} is finished: {done} of {config.step.steps} steps are done. "
                    "Raise --steps to go on, or use another --run-dir."
                )
            sys.exit(0)
    if os.environ.get("SLURM_NTASKS", "1") != "1" and launch.world_size == 1:
        print(
            f"train_llm.py: warning: SLURM gave this job {os.environ['SLURM_NTASKS']} tasks, "
            "but this is one process on its own: start it with srun or torchrun",
            file=sys.stderr,
        )
    planning = config.layout.print_plan
    optimizer, steps = config.optimizer, config.optimizer.lr_decay_steps or config.step.steps
    if launch.rank == 0 and optimizer.warmup_steps > steps and not planning:
        print(
            f"train_llm.py: warning: the learning rate rises over {optimizer.warmup_steps} steps "
            f"and the schedule ends at step {steps}, before its peak: for a whole one, use "
            f"--warmup-steps {steps // 10} or more --steps",
            file=sys.stderr,
        )
    if launch.rank == 0 and config.layout.tp > launch.local_world_size and not planning:
        print(
            f"train_llm.py: warning: --tp {config.layout.tp} spans nodes of "
            f"{launch.local_world_size} processes: tensor parallelism over a network is slow",
            file=sys.stderr,
        )
    return config, layout, launch
