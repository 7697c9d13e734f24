"""Saving and loading a run: DCP shards of weights, moments and RNG, and one JSON file.

``checkpoints/step-00000200`` exists only when it is complete: everything is written and fsynced
under a hidden temporary name, and a rename commits it.
"""

import contextlib
import datetime
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from common.errors import ConfigError
from common.files import names_in, sync, write_atomic
from parallel.mesh import Ranks
from training.checkpoint.dcp_files import CheckpointReader, CheckpointWriter
from training.checkpoint.folder import (
    STATE,
    DamageError,
    checkpoint_name,
    complete_checkpoints,
    file_sum,
    put_aside,
    read_checkpoint_state,
    write_sums,
)
from training.config.schema import RunSection
from training.optimizers.sharded import ShardedOptimizer


@dataclass
class TrainState:
    """How far a run is. The next sample to read is ``step`` times the global batch size.

    Attributes:
        step: optimizer steps done, counting skipped ones.
        tokens: input tokens consumed, each counted once however it is split over ranks.
        skipped_steps: steps whose batch held no target token.
    """

    step: int = 0
    tokens: int = 0
    skipped_steps: int = 0

    def count(self, tokens: int, skipped: bool) -> None:
        """Count a step of so many tokens."""
        self.step += 1
        self.tokens += tokens
        self.skipped_steps += skipped


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds, live: to load it is to load the run."""

    model: nn.Module
    optimizer: ShardedOptimizer
    state: TrainState
    ranks: Ranks

    def tensors(self, rng: bool) -> dict:
        """Everything that DCP reads and writes."""
        state = {
            "model": {name: p.detach() for name, p in self.model.named_parameters()},
            "optimizer": self.optimizer.named_state(),
        }
        if rng:
            # One key per rank: DCP takes equal keys for replicas of one value.
            rank = f"rank-{self.ranks.rank:05d}"
            state["rng"] = {f"{rank}.cpu": torch.get_rng_state()}
            if self.ranks.device.type == "cuda":
                state["rng"][f"{rank}.cuda"] = torch.cuda.get_rng_state()
        return state


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message is one line."""


def _cause(error: BaseException) -> str:
    """The first failure of a rank, in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class Checkpointer:
    """Saves a run now and then; all ranks call the same methods at the same step.

    In the background, a save costs the training a copy of this rank's shards in host memory, which
    is kept for the next one. At most one is in flight. A save that fails is reported, and the
    training goes on: the next one is another try.

    Attributes:
        fault: why the last save failed; None if it did not.
        saved_step: the step of the newest checkpoint that all ranks know to be complete, or -1.
    """

    def __init__(
        self,
        folder: Path,
        contents: Contents,
        config: RunSection,
        *,
        identity: dict,
        started_from: Path | None = None,
        report: Callable[[str | None], None] = lambda fault: None,
        check_held: Callable[[], None] = lambda: None,
    ):
        """
        Args:
            folder: where the checkpoints are.
            identity: what a resumed run must have in common with this one.
            started_from: the checkpoint this start goes on from; it is never dropped.
            report: called with why a save failed, unless it was the last one, and with None when
                one succeeds after that.
            check_held: raises OSError where the folder is not that of this run any more.
        """
        self._folder, self._contents, self._config = folder, contents, config
        self._identity, self._started_from, self._report = identity, started_from, report
        self._state, self._ranks, self._check_held = contents.state, contents.ranks, check_held
        self.saved_step = contents.state.step if started_from else -1
        self.fault: str | None = None
        self._in_flight: tuple[int, Future] | None = None
        if config.async_checkpoint:
            # Of its own, since the training uses the other groups at the same time.
            timeout = datetime.timedelta(seconds=config.comm_timeout)
            self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoint")
            cuda = self._ranks.device.type == "cuda"
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=cuda,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=cuda,
                )
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        # What has begun is finished, also where the training has failed, whose error comes first.
        with contextlib.suppress(BaseException) if error else contextlib.nullcontext():
            self._wait()

    def save(self) -> None:
        """Save the current step, or begin to. Collective; fails only where the ranks cannot meet.

        Does nothing if this step has been saved.
        """
        self._save(last=False)

    def _save(self, last: bool) -> None:
        self._wait(last)
        step = self._state.step
        if self.saved_step == step:
            return
        tensors = self._contents.tensors(rng=True)
        state = asdict(self._state) | {
            "world_size": self._ranks.launch.world_size,
            "mesh": dict(zip(self._ranks.mesh.mesh_dim_names, self._ranks.mesh.shape, strict=True)),
            "identity": self._identity,
        }
        writer = CheckpointWriter(
            self._partial(step), lambda sums: self._commit(state, sums), self._check_held
        )
        if self._config.async_checkpoint:
            future = dcp.async_save(
                tensors,
                storage_writer=writer,
                async_stager=self._stager,
                process_group=self._group,
            )
        else:
            future = Future()
            try:
                dcp.save(tensors, storage_writer=writer, process_group=self._ranks.control)
                future.set_result(None)
            except CheckpointException as error:
                future.set_exception(error)
        self._in_flight = step, future
        if future.done():
            self._wait(last)

    def finish(self) -> None:
        """Return when the current step is saved.

        Raises:
            CheckpointError: if it cannot be.
        """
        self._save(last=True)
        self._wait(last=True)
        if self.saved_step != self._state.step:
            raise CheckpointError(self.fault)

    def _wait(self, last: bool = False) -> None:
        """Return when nothing is in flight; ``last``: no training goes on after this save."""
        if self._in_flight is None:
            return
        (step, future), self._in_flight = self._in_flight, None
        try:
            future.result()
        except CheckpointException as error:
            # The room is needed to say so in status.json.
            with contextlib.suppress(OSError):
                self._check_held()
                shutil.rmtree(self._partial(step), ignore_errors=True)
            self.fault = (
                f"{self._folder / checkpoint_name(step)} cannot be written: {_cause(error)}"
            )
            if not last:
                self._report(self.fault)
            return
        self.saved_step = step
        if self.fault:
            self.fault = None
            self._report(None)

    def _partial(self, step: int) -> Path:
        return self._folder / f".{checkpoint_name(step)}.partial"

    def _commit(self, state: dict, sums: dict[str, str]) -> None:
        """Turn written shards into a checkpoint; on the first rank, possibly in the background."""
        self._check_held()
        partial, final = self._partial(state["step"]), self._folder / checkpoint_name(state["step"])
        write_atomic(partial / STATE, json.dumps(state, indent=1))
        write_sums(partial, sums | {STATE: file_sum(partial / STATE)})
        if os.path.lexists(final):
            # Not complete, or the run would have gone on from it; but not ours to delete.
            put_aside(final, "unused")
        sync(partial)
        os.rename(partial, final)
        sync(final.parent)
        # From here on the checkpoint exists: what goes wrong is no failure of the save.
        with contextlib.suppress(OSError, ConfigError):
            self._prune()

    def _prune(self) -> None:
        if self._config.keep_checkpoints:
            for old in complete_checkpoints(self._folder)[: -self._config.keep_checkpoints]:
                if old != self._started_from:
                    # Renamed first: a removal that is cut short must not leave half a checkpoint.
                    doomed = old.with_name(f".{old.name}.partial")
                    os.rename(old, doomed)
                    _remove(doomed)


def remove_partial(folder: Path) -> None:
    """Remove what an interrupted save or removal left behind.

    Raises:
        ConfigError: if that cannot be known.
    """
    for name in names_in(folder):
        if re.fullmatch(r"\.step-[0-9]{8,}\.partial", name):
            _remove(folder / name)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(checkpoint: Path, contents: Contents) -> None:
    """Load weights, moments and state in place, resharded to this layout.

    The RNG states come back where the number of ranks is unchanged. Nothing in a training step
    draws random numbers, so another number of ranks continues the same run all the same.

    Raises:
        CheckpointError: if it cannot be read.
    """
    try:
        saved = read_checkpoint_state(checkpoint)
        same_ranks = saved["world_size"] == contents.ranks.launch.world_size
        tensors = contents.tensors(rng=same_ranks)
        reader = CheckpointReader(checkpoint)
        if same_ranks:
            # One that was saved on CPUs has no state of a GPU.
            saved_names = reader.read_metadata().state_dict_metadata
            tensors["rng"] = {k: v for k, v in tensors["rng"].items() if f"rng.{k}" in saved_names}
        dcp.load(tensors, storage_reader=reader, process_group=contents.ranks.control)
    except (OSError, DamageError, ConfigError, CheckpointException) as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {_cause(error)}") from error
    for name, value in tensors.get("rng", {}).items():
        try:
            (torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state)(value)
        except RuntimeError as error:
            raise CheckpointError(f"{checkpoint} holds no state for {name}") from error
    for name in asdict(contents.state):
        setattr(contents.state, name, saved[name])
