"""Checkpoints: DCP shards of weights, moments and RNG, plus one JSON file a person can read.

``checkpoints/step-00000200`` exists only when it is complete: everything is written and fsynced
under a hidden temporary name, and a rename commits it.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from parallel.mesh import Ranks
from training.optimizer import ShardedOptimizer
from training.run_dir import complete_checkpoints, read_checkpoint_state, write_atomic


@dataclass
class Progress:
    """How far a run is. The next sample to read is ``step`` times the global batch size.

    Attributes:
        step: optimizer steps done, counting skipped ones.
        tokens: input tokens consumed, each counted once however it is split over ranks.
        skipped_steps: steps whose batch held no target token.
    """

    step: int = 0
    tokens: int = 0
    skipped_steps: int = 0


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
) -> Path:
    """Write ``folder/step-<progress.step>`` and drop all but the ``keep`` newest (0 keeps all).

    Args:
        identity: what a resumed run must have in common with this one.

    Returns:
        The path of the checkpoint. One that exists already is left as it is.
    """
    final = folder / f"step-{progress.step:08d}"
    if final.exists():
        return final
    partial = folder / f".{final.name}.partial"
    dcp.save(
        _tensors(model, optimizer, ranks, rng=True),
        checkpoint_id=partial,
        process_group=ranks.control,
    )
    if ranks.rank == 0:
        state = {
            **asdict(progress),
            "world_size": ranks.launch.world_size,
            "mesh": dict(zip(ranks.mesh.mesh_dim_names, ranks.mesh.shape, strict=True)),
            "identity": identity,
        }
        write_atomic(partial / "state.json", json.dumps(state, indent=1))
        _commit(partial, final)
        if keep:
            for old in complete_checkpoints(folder)[:-keep]:
                _remove(old)
    return final


def _commit(partial: Path, final: Path) -> None:
    for path in (partial, None):
        if path is None:
            os.rename(partial, final)
        fd = os.open(path or final.parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


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
    dcp.load(tensors, checkpoint_id=checkpoint, process_group=ranks.control)
    for name, value in tensors.get("rng", {}).items():
        (torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state)(value)
    for field in fields(Progress):
        setattr(progress, field.name, saved[field.name])
