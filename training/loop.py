"""The training loop: the order of a step, and when to log, evaluate, save and stop."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from parallel.context_parallel import local_tokens
from parallel.layout import Layout
from parallel.mesh import Ranks
from training.checkpoint.saver import Checkpointer, TrainState
from training.config.schema import Config
from training.data.batches import IGNORE_INDEX, TokenData, prefetch, train_batch
from training.evaluate import evaluate
from training.optimizers.schedule import lr_at
from training.run import garbage
from training.run.directory import LostRunError
from training.run.observers import Observers
from training.run.outcome import LOST, REASONS
from training.step import Batch, Engine, FaultFlag, StepResult, forward_backward, update


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
        """``stop_requested`` says why this rank is to stop, or None."""

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
                micro_batch_size=layout.micro_batch_size,
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
        self._run_dir = config.run_dir
        self._upcoming, self._waited = None, 0.0
        self.fetch()
        self._waited = 0.0  # the first step has not begun

    def fetch(self) -> None:
        """Take the next batch, if there is one, and start agreeing on it."""
        started = time.perf_counter()
        batch = next(self._batches, None)
        self._waited += time.perf_counter() - started
        if batch is None:
            return
        # The tp and pp ranks of a dp rank read the same tokens, if any; one of them counts.
        targets = sum(int((t != IGNORE_INDEX).sum()) for _, t in batch)
        mine = targets if self._ranks.tp_rank == self._ranks.pp_rank == 0 else 0
        why = self._stop_requested()
        vector = torch.tensor([mine, *(why == reason for reason in REASONS)], dtype=torch.int64)
        work = dist.all_reduce(vector, group=self._ranks.control, async_op=True)
        device = self._ranks.device
        moved = [tuple(x.to(device, non_blocking=True) for x in pair) for pair in batch]
        self._upcoming = moved, vector, work

    def take(self) -> tuple[Batch, int, str | None]:
        """The fetched batch, the target tokens of all ranks, and why to stop before the batch.

        Raises:
            LostRunError: if the run directory is not that of this start any more.
        """
        batch, vector, work = self._upcoming
        work.wait()
        targets, *asked = vector.tolist()
        reasons = (reason for reason, ranks in zip(REASONS, asked, strict=True) if ranks)
        if (why := next(reasons, None)) == LOST:
            raise LostRunError(
                f"--run-dir {self._run_dir} was moved or replaced, or its .lock was, while this "
                "job ran: it stops, and writes nothing there; its checkpoints are where the "
                "directory is"
            )
        return batch, targets, why

    def waited(self) -> float:
        """Seconds waited for data since the last call."""
        seconds, self._waited = self._waited, 0.0
        return seconds


def train(
    engine: Engine,
    batches: AgreedBatches,
    data: TokenData,
    state: TrainState,
    config: Config,
    observers: Observers,
    checkpointer: Checkpointer,
) -> str | None:
    """Train from ``state`` to ``config.step.steps``, and save at the end.

    Returns:
        Why all ranks stopped before that; None if they did not.

    Raises:
        NonFiniteError: at the next logged step or save, on all ranks; nothing is saved then.
        CheckpointError: if the last step cannot be saved.
        LostRunError: if the run directory is not that of this start any more; on all ranks.
    """
    last, every, section = config.step.steps, config.run, config.optimizer
    tokens = config.step.global_batch_size * config.step.seq_len
    at, fingerprints, stop = observers.heartbeat.at, observers.fingerprints, None
    observers.meter.restart()
    for step in range(state.step + 1, last + 1):
        observers.profiler.begin(step)
        at(step, "agreeing on the batch")
        batch, target_tokens, stop = batches.take()
        if stop:
            break
        at(step, "forward and backward")
        lr, result = lr_at(section, section.lr_decay_steps or last, step), None
        # All ranks know from the agreed count whether there is a target: no collective waits.
        if target_tokens:
            fingerprints.begin(step, batch)
            share = forward_backward(engine, batch, target_tokens)
        at(step, "waiting for the data of the next step")
        batches.fetch()
        at(step, "gradient norm and update")
        observers.meter.begin_update()
        if target_tokens:
            fingerprints.gradients()
            result = update(engine, share, step=step, lr=lr, grad_clip=section.grad_clip)
            fingerprints.end(result.loss, result.grad_norm)
        state.count(tokens, skipped=not target_tokens)
        observers.meter.add(tokens)
        if step == 1 or _due(step, every.log_every) or step == last:
            at(step, "logging")
            _log(result, lr, state, batches, engine, observers)
        if _due(step, config.data.eval_every) and data.eval.len_with_tail:
            at(step, "evaluation")
            _evaluate(step, engine, data, config, observers)
        if _due(step, every.checkpoint_every) and step < last:
            at(step, "checkpoint")
            _save(engine, observers, checkpointer.save)
        garbage.collect(step)
    observers.profiler.stop()
    at(state.step, "last checkpoint")
    _save(engine, observers, checkpointer.finish)
    return stop


def _log(
    result: StepResult | None,
    lr: float,
    state: TrainState,
    batches: AgreedBatches,
    engine: Engine,
    observers: Observers,
) -> None:
    loss, norm, faulty_step = _read(result, engine.fault)
    meter = observers.meter
    record = meter.record(
        step=state.step,
        loss=loss,
        grad_norm=norm,
        lr=lr,
        tokens=state.tokens,
        skipped_steps=state.skipped_steps,
        data_seconds=batches.waited(),
        peak_memory_bytes=_max_over_ranks(meter.peak_bytes(), engine.ranks),
    )
    if observers.reporter:
        observers.reporter.log(record)
    engine.fault.check(engine.ranks, faulty_step)
    meter.restart()


def _evaluate(
    step: int, engine: Engine, data: TokenData, config: Config, observers: Observers
) -> None:
    with observers.meter.pause():
        record = evaluate(engine, data, config)
        if observers.reporter:
            observers.reporter.log_eval({"step": step, **record})


def _save(engine: Engine, observers: Observers, write: Callable[[], None]) -> None:
    """Save with a method of the checkpointer, unless a step was not finite."""
    with observers.meter.pause():
        engine.fault.check(engine.ranks)
        if observers.reporter:
            observers.reporter.sync()
        write()


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
