"""The training loop: one optimizer step, evaluation, and when to log, save and stop."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from parallel.context_parallel import local_tokens
from parallel.data_parallel import begin_micro_batch, reshard
from parallel.layout import Layout
from parallel.mesh import Ranks
from parallel.tensor_parallel import reduce_partial_gradients, rows_of
from training import garbage
from training.checkpoint import Checkpointer, Progress
from training.config import Config
from training.data import TokenData, eval_batches, num_eval_batches, prefetch, train_batch
from training.fingerprint import Fingerprints
from training.heartbeat import Heartbeat
from training.launcher import GONE
from training.loss import IGNORE_INDEX, chunked_cross_entropy_sum, cross_entropy_sum
from training.metrics import Meter
from training.optimizer import ShardedOptimizer, lr_at
from training.profiler import Profiler
from training.reporter import Reporter
from training.run_dir import LostRunError

if TYPE_CHECKING:
    from parallel.pipeline import Pipeline

Batch = list[tuple[Tensor, Tensor]]
# Why a run stops before its last step; the first that holds is the one that is said.
SIGNAL, TIME = "a rank received a signal", "the time of --stop-after is over"
LOST = "the run directory is not that of this start any more"
REASONS = (LOST, SIGNAL, GONE, TIME)


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm was not finite; the weights are those before that step."""

    def __init__(self, step: int, ranks: list[int], what: str):
        self.step, self.ranks = step, ranks
        names = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
        super().__init__(
            f"step {step}: {what} is not finite on {names}; that step changed nothing, "
            "and no checkpoint holds it"
        )


def batch_loss(model: nn.Module, inputs: Tensor, targets: Tensor, ranks: Ranks) -> Tensor:
    """Summed loss in nats of one micro-batch [B, S]; equal on all tp ranks."""
    rows = rows_of(model.config.vocab_size, ranks.tp, ranks.tp_rank)
    mine = {"vocab_start": rows.start, "tp_group": ranks.tp_group}
    chunks = model.lm_head.loss_chunks
    if chunks == 1:
        return cross_entropy_sum(model(inputs), targets, **mine)
    return model(inputs, lambda x, w: chunked_cross_entropy_sum(x, w, targets, chunks, **mine))


def forward_backward(
    model: nn.Module,
    batch: Batch,
    target_tokens: int,
    ranks: Ranks,
    zero: int,
    pipeline: "Pipeline | None" = None,
) -> Tensor:
    """Accumulate the gradient of the global mean loss over this rank's micro-batches.

    Args:
        target_tokens: number of targets of the whole optimizer step, over all ranks.
        zero: stage of the layout.
        pipeline: runs the micro-batches instead, where the model is cut into stages.

    Returns:
        float64 scalar: this dp rank's share of the global mean loss; zero on all pp ranks but one.
    """
    share = torch.zeros((), dtype=torch.float64, device=ranks.device)
    if pipeline:
        share, batch = pipeline.forward_backward(batch, target_tokens), []
    for number, (inputs, targets) in enumerate(batch, start=1):
        begin_micro_batch(model, zero=zero, last=number == len(batch))
        with record_function("forward"):
            loss = batch_loss(model, inputs, targets, ranks) / target_tokens
        with record_function("backward"):
            loss.backward()
        share += loss.detach()
    if ranks.tp_group:
        reduce_partial_gradients(model, ranks.tp_group)
    return share


@dataclass
class StepResult:
    """Device scalars of one step: nothing here has been read by the host."""

    loss: Tensor
    grad_norm: Tensor


class FaultFlag:
    """Remembers on the device the first step whose loss or gradient norm was not finite."""

    def __init__(self, device: torch.device):
        self.step = torch.zeros((), dtype=torch.float64, device=device)
        self._here = torch.zeros((), dtype=torch.int64, device=device)

    def record(self, step: int, sums: Tensor, local: Tensor) -> Tensor:
        """Note ``step`` if the global ``sums`` are not finite, and return 1.0 then, else 0.0.

        Args:
            local: this rank's own [squared gradient norm, loss].
        """
        bad = ~sums.isfinite().all()
        first = bad & (self.step == 0)
        squares_bad, loss_bad = ~local.isfinite()
        self._here = torch.where(first, torch.where(loss_bad, 2, squares_bad.long()), self._here)
        self.step = torch.where(first, float(step), self.step)
        return bad.float()

    def check(self, ranks: Ranks, step: int | None = None) -> None:
        """Raise :class:`NonFiniteError` on all ranks if a step was noted.

        Args:
            step: ``self.step``, where the caller has read it already; else the device is read.
        """
        step = int(self.step) if step is None else step
        if not step:
            return
        codes = torch.zeros(dist.get_world_size(ranks.control), dtype=torch.int64)
        codes[ranks.rank] = self._here.cpu()
        dist.all_reduce(codes, group=ranks.control)
        # A loss that is not finite spreads to every gradient: where there is one, it is the cause.
        worst = int(codes.max())
        where = [rank for rank, code in enumerate(codes.tolist()) if code == worst]
        raise NonFiniteError(step, where, "the loss" if worst == 2 else "the gradient")


def optimizer_step(
    model: nn.Module,
    optimizer: ShardedOptimizer,
    batch: Batch,
    target_tokens: int,
    ranks: Ranks,
    *,
    zero: int,
    pipeline: "Pipeline | None" = None,
    lr: float,
    grad_clip: float,
    step: int,
    fault: FaultFlag,
    while_reducing: Callable[[], None] = lambda: None,
    fingerprints: Fingerprints | None = None,
) -> StepResult:
    """Forward, backward, global norm, clip, update. The host never waits for the device here.

    Args:
        batch: this dp rank's micro-batches.
        target_tokens: targets of the whole step, over all ranks and micro-batches.
        zero, pipeline: as in :func:`forward_backward`.
        grad_clip: largest global norm; 0 turns clipping off.
        while_reducing: called after the backward is queued, to use the time.
    """
    share = forward_backward(model, batch, target_tokens, ranks, zero, pipeline)
    while_reducing()
    if fingerprints:
        fingerprints.gradients()
    with record_function("gradient norm"):
        local = optimizer.local_sums(share)
        sums = local.clone()
        if ranks.tp_rank != 0:
            # All tp ranks of a dp rank hold the same loss; one of them counts.
            sums[1] = 0
        dist.all_reduce(sums)
        norm = sums[0].sqrt()
        skip = fault.record(step, sums, local)
        if grad_clip:
            optimizer.clip(norm, grad_clip)
    with record_function("update"):
        optimizer.step(lr, skip)
        optimizer.zero_grad()
    if fingerprints:
        fingerprints.end(sums[1], norm)
    return StepResult(loss=sums[1], grad_norm=norm)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: TokenData,
    config: Config,
    layout: Layout,
    ranks: Ranks,
    pipeline: "Pipeline | None" = None,
) -> dict:
    """Mean loss per token over the held-out sequences, each counted once; same on every layout.

    Returns:
        ``eval_loss`` in nats per token and ``eval_tokens``, the number of targets.
    """
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    sizes = {
        "global_batch_size": config.step.global_batch_size,
        "max_batches": config.data.eval_batches,
    }
    batches = [[]] * num_eval_batches(data.eval, **sizes)
    if ranks.pp_rank in layout.data_pp_ranks:
        batches = eval_batches(
            data.eval,
            dp_rank=ranks.dp_rank,
            dp=layout.data_ranks,
            batch_size=layout.batch_size,
            **sizes,
        )
    for batch in batches:
        batch = [
            tuple(local_tokens(x, ranks.cp, ranks.cp_rank).to(ranks.device) for x in pair)
            for pair in batch
        ]
        if pipeline:
            total[0] += pipeline.forward(batch)
        else:
            total[0] += sum(batch_loss(model, *pair, ranks) for pair in batch)
        total[1] += sum((targets != IGNORE_INDEX).sum() for _, targets in batch)
    reshard(model)
    if ranks.tp_rank != 0:
        total.zero_()
    if ranks.pp_rank != 0:
        total[1] = 0
    dist.all_reduce(total)
    loss, tokens = total.tolist()
    return {"eval_loss": loss / max(tokens, 1), "eval_tokens": int(tokens)}


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
