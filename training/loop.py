"""The training loop: one optimizer step, evaluation, and when to log, save and stop."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from parallel.context_parallel import local_tokens
from parallel.layout import Layout
from parallel.mesh import Ranks
from training.checkpoint.saver import Checkpointer, Progress
from training.config.schema import Config
from training.data.batches import TokenData, prefetch, train_batch
from training.evaluate import evaluate
from training.loss import IGNORE_INDEX
from training.optimizers.schedule import lr_at
from training.optimizers.sharded import ShardedOptimizer
from training.run import garbage
from training.run.directory import LostRunError
from training.run.fingerprints import Fingerprints
from training.run.heartbeat import Heartbeat
from training.run.metrics import Meter
from training.run.outcome import LOST, REASONS
from training.run.profiler import Profiler
from training.run.reporter import Reporter
from training.step import Batch, FaultFlag, StepResult, optimizer_step

if TYPE_CHECKING:
    from parallel.pipeline import Pipeline


class AgreedBatches:
    """This rank's batches, each with what all ranks agreed about it.

    Each step all ranks sum one small CPU vector (target tokens, ranks that ask to stop and why) on
    the control group. It is started as soon as the batch is at hand, a step before it is needed.
    """

    def __init__(
        self,
        data: TokenData,
        first_step: int,
        config: Config,
        layout: Layout,
        ranks: Ranks,
        stop_requested: Callable[[], str | None],
    ):
        def make(step: int) -> Batch:
            if ranks.pp_rank not in layout.data_pp_ranks:
                return []
            batch = train_batch(
                data.train,
                step,
                global_batch_size=config.step.global_batch_size,
                seed=config.step.seed,
                dp_rank=ranks.dp_rank,
                dp=layout.data_ranks,
                batch_size=layout.batch_size,
            )
            batch = [
                tuple(local_tokens(x, ranks.cp, ranks.cp_rank) for x in pair) for pair in batch
            ]
            if ranks.device.type == "cpu":
                return batch
            # From pageable memory the copy would wait for the device.
            return [tuple(x.pin_memory() for x in pair) for pair in batch]

        self._batches = prefetch(make, first_step, config.step.steps)
        self._ranks, self._stop_requested = ranks, stop_requested
        self._upcoming, self._waited = None, 0.0
        self.fetch()

    def fetch(self) -> None:
        """Take the next batch, if there is one, and start agreeing on it."""
        started = time.perf_counter()
        batch = next(self._batches, None)
        self._waited += time.perf_counter() - started
        if batch is None:
            return
        # All tp and pp ranks of a dp rank have the same batch; one of them counts.
        targets = sum(int((t != IGNORE_INDEX).sum()) for _, t in batch)
        mine = targets if self._ranks.tp_rank == self._ranks.pp_rank == 0 else 0
        why = self._stop_requested()
        vector = torch.tensor([mine, *(why == reason for reason in REASONS)], dtype=torch.int64)
        work = dist.all_reduce(vector, group=self._ranks.control, async_op=True)
        device = self._ranks.device
        moved = [tuple(x.to(device, non_blocking=True) for x in pair) for pair in batch]
        self._upcoming = moved, vector, work

    def take(self) -> tuple[Batch, int, str | None]:
        """The fetched batch, its global number of target tokens, and why to stop before it."""
        batch, vector, work = self._upcoming
        work.wait()
        targets, *asked = vector.tolist()
        why = (reason for reason, ranks in zip(REASONS, asked, strict=True) if ranks)
        return batch, targets, next(why, None)

    def waited(self) -> float:
        """Seconds waited for data since the last call."""
        seconds, self._waited = self._waited, 0.0
        return seconds


def train(
    model: nn.Module,
    optimizer: ShardedOptimizer,
    data: TokenData,
    progress: Progress,
    config: Config,
    layout: Layout,
    ranks: Ranks,
    *,
    pipeline: "Pipeline | None" = None,
    meter: Meter,
    fingerprints: Fingerprints | None = None,
    reporter: Reporter | None,
    profiler: Profiler | None = None,
    checkpointer: Checkpointer,
    heartbeat: Heartbeat,
    stop_requested: Callable[[], str | None],
) -> str | None:
    """Train from ``progress`` to ``config.step.steps``, and save at the end.

    Args:
        pipeline: runs the micro-batches, where the model is cut into stages.
        meter: times the steps.
        fingerprints: records the first steps of the run for a comparison.
        reporter: receives the metrics; None on all ranks but the first.
        profiler: records chosen steps.
        checkpointer: saves now and then, and at the end.
        heartbeat: is told the step and phase.
        stop_requested: why this rank is to stop, or None; all ranks stop at the same step.

    Returns:
        Why it stopped early; None if it did not.

    Raises:
        NonFiniteError: at the next logged step or save, on all ranks; nothing is saved then.
        CheckpointError: if the last step cannot be saved.
        LostRunError: if the run directory is not that of this start any more; on all ranks.
    """
    last, run = config.step.steps, config.run
    decay_steps = config.optimizer.lr_decay_steps or last
    tokens_per_step = config.step.global_batch_size * config.step.seq_len
    batches = AgreedBatches(data, progress.step, config, layout, ranks, stop_requested)
    fault, stop = FaultFlag(ranks.device), None

    def after_backward() -> None:
        heartbeat.at(step, "waiting for the data of the next step")
        batches.fetch()
        heartbeat.at(step, "gradient norm and update")
        meter.begin_update()

    def save(write: Callable[[], None]) -> None:
        fault.check(ranks)
        if reporter:
            reporter.sync()
        write()

    meter.restart()
    for step in range(progress.step + 1, last + 1):
        if profiler:
            profiler.begin(step)
        heartbeat.at(step, "agreeing on the batch")
        batch, target_tokens, stop = batches.take()
        if stop == LOST:
            raise LostRunError(
                f"--run-dir {config.run_dir} was moved or replaced, or its .lock was, while this "
                "job ran: it stops, and writes nothing there; its checkpoints are where the "
                "directory is"
            )
        if stop:
            break
        heartbeat.at(step, "forward and backward")
        lr, result = lr_at(config.optimizer, decay_steps, step), None
        if target_tokens:
            if fingerprints:
                fingerprints.begin(step, batch)
            result = optimizer_step(
                model, optimizer, batch, target_tokens, ranks,
                zero=layout.zero, pipeline=pipeline, lr=lr,
                grad_clip=config.optimizer.grad_clip, step=step, fault=fault,
                while_reducing=after_backward, fingerprints=fingerprints,
            )  # fmt: skip
        else:
            # All ranks know it from the agreed count, so no collective is left waiting.
            after_backward()
            progress.skipped_steps += 1
        progress.step = step
        progress.tokens += tokens_per_step
        meter.add(tokens_per_step)

        if step == 1 or step % run.log_every == 0 or step == last:
            heartbeat.at(step, "logging")
            _log(result, fault, lr, progress, batches, meter, reporter, ranks)
        if _due(step, config.data.eval_every) and data.eval.len_with_tail:
            heartbeat.at(step, "evaluation")
            with meter.pause():
                found = evaluate(model, data, config, layout, ranks, pipeline)
                if reporter:
                    reporter.log_eval({"step": step, **found})
        if _due(step, run.checkpoint_every) and step < last:
            heartbeat.at(step, "checkpoint")
            with meter.pause():
                save(checkpointer.save)
        garbage.collect(step)
    if profiler:
        profiler.stop()
    heartbeat.at(progress.step, "last checkpoint")
    save(checkpointer.finish)
    return stop


def _log(
    result: StepResult | None,
    fault: FaultFlag,
    lr: float,
    progress: Progress,
    batches: AgreedBatches,
    meter: Meter,
    reporter: Reporter | None,
    ranks: Ranks,
) -> None:
    loss, norm, faulty_step = _read(result, fault)
    record = meter.record(
        step=progress.step,
        loss=loss,
        grad_norm=norm,
        lr=lr,
        tokens=progress.tokens,
        skipped_steps=progress.skipped_steps,
        data_seconds=batches.waited(),
        peak_memory_bytes=_max_over_ranks(meter.peak_bytes(), ranks),
    )
    if reporter:
        reporter.log(record)
    fault.check(ranks, faulty_step)
    meter.restart()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _read(result: StepResult | None, fault: FaultFlag) -> tuple[float | None, float | None, int]:
    """Loss, gradient norm and first faulty step: the one host sync of a logged step."""
    if result is None:
        return None, None, int(fault.step)
    loss, norm, step = torch.stack((result.loss, result.grad_norm, fault.step)).tolist()
    return loss, norm, int(step)


def _max_over_ranks(value: int | None, ranks: Ranks) -> int | None:
    vector = torch.tensor([-1 if value is None else value])
    dist.all_reduce(vector, dist.ReduceOp.MAX, group=ranks.control)
    return None if vector.item() < 0 else int(vector)
