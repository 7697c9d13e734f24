"""Checkpoints: DCP shards of weights, moments and RNG, plus one JSON file a person can read.

``checkpoints/step-00000200`` exists only when it is complete: everything is written and fsynced
under a hidden temporary name, and a rename commits it.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from parallel.mesh import Ranks
from training.optimizer import ShardedOptimizer
from training.run_dir import complete_checkpoints, read_checkpoint_state, sync, write_atomic


@dataclass
class Progress:
    """How far a run is. The next sample to read is ``step`` times the global batch size.

    Attributes:
        step: optimizer steps done, counting skipped ones.
        tokens: input tokens consumed, each counted once however it is split over ranks.
        skipped_steps: steps whose batch held no target token.
        saved_step: the step of the last checkpoint, or -1. Each rank knows it without a look at
            the disk, where rank 0 may still be renaming.
    """

    step: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    saved_step: int = -1


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message is one line."""


def _tensors(model: nn.Module, optimizer: ShardedOptimizer, ranks: Ranks, rng: bool) -> dict:
    """Everything DCP reads and writes, live: loading into it loads the run."""
    state = {
        "model": {name: p.detach() for name, p in model.named_parameters()},
        "optimizer": optimizer.named_state(),
    }
    if rng:
        # One key per rank: DCP takes equal keys for replicas of one value.
        state["rng"] = {f"rank-{ranks.rank:05d}.cpu": torch.get_rng_state()}
        if ranks.device.type == "cuda":
            state["rng"][f"rank-{ranks.rank:05d}.cuda"] = torch.cuda.get_rng_state()
    return state


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: ShardedOptimizer,
    progress: Progress,
    ranks: Ranks,
    *,
    identity: dict,
    keep: int,
) -> None:
    """Write ``folder/step-<progress.step>`` and drop all but the ``keep`` newest (0 keeps all).

    Args:
        identity: what a resumed run must have in common with this one.

    Does nothing if this step has been saved.

    Raises:
        CheckpointError: for example on a full disk; what was written of it is removed.
    """
    if progress.saved_step == progress.step:
        return
    final = folder / f"step-{progress.step:08d}"
    partial = folder / f".{final.name}.partial"
    try:
        dcp.save(
            _tensors(model, optimizer, ranks, rng=True),
            checkpoint_id=partial,
            process_group=ranks.control,
        )
        _finish(folder, final, partial, progress, ranks, identity, keep)
    except (OSError, CheckpointException) as error:
        # The room is needed to say so in status.json.
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{final} cannot be written: {_cause(error)}") from error
    progress.saved_step = progress.step


def _finish(
    folder: Path,
    final: Path,
    partial: Path,
    progress: Progress,
    ranks: Ranks,
    identity: dict,
    keep: int,
) -> None:
    if ranks.rank == 0:
        state = {
            "step": progress.step,
            "tokens": progress.tokens,
            "skipped_steps": progress.skipped_steps,
            "world_size": ranks.launch.world_size,
            "mesh": dict(zip(ranks.mesh.mesh_dim_names, ranks.mesh.shape, strict=True)),
            "identity": identity,
        }
        write_atomic(partial / "state.json", json.dumps(state, indent=1))
        _commit(partial, final)
        if keep:
            for old in complete_checkpoints(folder)[:-keep]:
                _remove(old)


def _cause(error: BaseException) -> str:
    """The first failure of a rank, in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _commit(partial: Path, final: Path) -> None:
    if os.path.lexists(final):
        # Not complete, or the run would have gone on from it; but not ours to delete.
        os.replace(final, final.with_name(f"{final.name}.incomplete-{os.getpid()}"))
    sync(partial)
    os.rename(partial, final)
    sync(final.parent)


def _remove(checkpoint: Path) -> None:
    # Renamed first: a removal that is cut short must not leave what looks like a checkpoint.
    doomed = checkpoint.with_name(f".{checkpoint.name}.partial")
    os.rename(checkpoint, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Remove what an interrupted save or removal left behind."""
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(
    checkpoint: Path,
    model: nn.Module,
    optimizer: ShardedOptimizer,
    progress: Progress,
    ranks: Ranks,
) -> None:
    """Load weights, moments and progress in place, resharded to this layout.

    The RNG states come back where the number of ranks is unchanged. Nothing in a training step
    draws random numbers, so another number of ranks continues the same run all the same.
    """
    saved = read_checkpoint_state(checkpoint)
    same_ranks = saved["world_size"] == ranks.launch.world_size
    tensors = _tensors(model, optimizer, ranks, rng=same_ranks)
    try:
        dcp.load(tensors, checkpoint_id=checkpoint, process_group=ranks.control)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(
            f"{checkpoint} cannot be read: {_cause(error)}; remove it to go on from the one before"
        ) from error
    for name, value in tensors.get("rng", {}).items():
        (torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state)(value)
    progress.step, progress.saved_step = saved["step"], saved["step"]
    progress.tokens, progress.skipped_steps = saved["tokens"], saved["skipped_steps"]
