"""Pipeline parallelism: the stages of a rank, and the micro-batches that run through them."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    RESHARD,
    UNSHARD,
    PipelineScheduleMulti,
    get_schedule_class,
)

from models.decoder import Llama
from parallel.data_parallel import begin_micro_batch
from parallel.layout import Layout
from parallel.mesh import Ranks
from parallel.stages import SCHEDULES, Stage

# On an error each rank would print the table of its schedule.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


def split(model: Llama, stages: Sequence[Stage]) -> list[Llama]:
    """Leave ``model``, on the meta device, only what this rank holds, and give its stages.

    A stage is a Llama of some blocks that shares them with ``model``; only the stages run.
    """
    parts, layers = [], model.model.layers
    for stage in stages:
        with torch.device("meta"):
            part = Llama(model.config.model_copy(update={"num_hidden_layers": 0}))
        part.config = model.config
        part.model.layers = nn.ModuleDict({str(i): layers[str(i)] for i in stage.blocks})
        part.model.embed_tokens = model.model.embed_tokens if stage.first else None
        part.model.norm = model.model.norm if stage.last else None
        part.lm_head = model.lm_head if stage.last else None
        parts.append(part)
    here = {str(i) for stage in stages for i in stage.blocks}
    model.model.layers = nn.ModuleDict({k: block for k, block in layers.items() if k in here})
    if not any(stage.first for stage in stages):
        model.model.embed_tokens = None
    if not any(stage.last for stage in stages):
        model.model.norm = model.lm_head = None
    return parts


class _Stage(PipelineStage):
    """A stage whose FSDP2 units keep to the ZeRO stage, as they do without a pipeline.

    torch's own stage holds whole parameters and gradients for a step. That is ZeRO-1, and all that
    is possible where a backward is split: the gradients of the weights come at the end.
    """

    def __init__(self, *args, layout: Layout, loss: Callable, **kwargs):
        super().__init__(*args, **kwargs)
        self._zero, self._loss = layout.zero, loss
        self._splits = SCHEDULES[layout.pp_schedule].splits_backward

    def forward_maybe_with_nosync(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return self._loss(self.submod, x, targets) if self.is_last else self.submod(x)

    def backward_maybe_with_nosync(self, kind: str, kwargs: dict, last_backward: bool = False):
        if self._splits:
            return super().backward_maybe_with_nosync(kind, kwargs, last_backward)
        begin_micro_batch(self.submod, zero=self._zero, last=last_backward)
        whole = kwargs["stage_output"], kwargs["output_grads"], kwargs["input_values"]
        return stage_backward(*whole), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        # Otherwise the last backward has done it.
        if self._splits and self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    # torch makes a buffer for what each end of a stage receives in every micro-batch of a step, and
    # keeps them all. These are there from the receiving until the forward or backward has begun
    # with them; autograd keeps what it needs.

    def _prepare_forward_infra(self, *args, **kwargs):
        with self._only_shapes():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args, **kwargs):
        with self._only_shapes():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextlib.contextmanager
    def _only_shapes(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list:
        _remake(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list:
        _remake(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _remake(self.args_recv_info[fwd_chunk_id], "meta")
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args, **kwargs) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        _remake(self.grad_recv_info.get(bwd_chunk_id, ()), "meta")

    # In a V a rank hands gradients over to itself, and torch asks for them in an evaluation, too.

    def get_local_bwd_output(self, mb_index: int) -> tuple:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def _remake(received: tuple, device: torch.device | str) -> None:
    """Replace receive buffers by new ones of the same shapes on ``device``."""
    for info in received:
        if info.buffer is not None:
            info.buffer = torch.empty_like(info.buffer, device=device)


class Pipeline:
    """Runs the micro-batches of a step through the stages of all pp ranks."""

    def __init__(
        self,
        parts: list[Llama],
        stages: Sequence[Stage],
        layout: Layout,
        ranks: Ranks,
        loss: Callable[[Llama, Tensor, Tensor], Tensor],
        *,
        seq_len: int,
        dtype: torch.dtype,
    ):
        """
        Args:
            parts: the models of ``stages``, those of this rank.
            loss: summed loss of a model, its inputs and targets [B, S].
            seq_len: tokens of a whole sequence.
            dtype: compute dtype.
        """
        self._first = any(stage.first for stage in stages)
        self._last = any(stage.last for stage in stages)
        self._device, self._divisor = ranks.device, 1.0
        # Shapes are given, or torch would run a forward and a backward to find them.
        size, length = layout.micro_batch_size, seq_len // layout.cp
        tokens = torch.empty((size, length), dtype=torch.int64, device="meta")
        width = length // parts[0].sequence_shards, parts[0].config.hidden_size
        hidden = torch.empty((size, *width), dtype=dtype, device="meta", requires_grad=True)
        scalar = torch.empty((), dtype=torch.promote_types(dtype, torch.float32), device="meta")
        built = [
            _Stage(
                part,
                stage.index,
                stage.count,
                ranks.device,
                input_args=tokens if stage.first else hidden,
                output_args=scalar if stage.last else hidden,
                group=ranks.mesh.get_group("pp"),
                layout=layout,
                loss=loss,
            )
            for part, stage in zip(parts, stages, strict=True)
        ]
        kind = get_schedule_class(SCHEDULES[layout.pp_schedule].torch_name)
        several = issubclass(kind, PipelineScheduleMulti)
        self._schedule = kind(
            built if several else built[0],
            n_microbatches=layout.micro_batches,
            loss_fn=lambda summed, _: summed / self._divisor,
            scale_grads=False,
        )
        if several and not SCHEDULES[layout.pp_schedule].splits_backward:
            # FSDP2's hooks gather and free, not the schedule.
            self._schedule.unsharded_stages.update(stage.index for stage in stages)
            for action in (UNSHARD, RESHARD):
                self._schedule.register_custom_function(action, lambda *_: None)

    def forward_backward(self, batch: list[tuple[Tensor, Tensor]], target_tokens: int) -> Tensor:
        """As :func:`training.step.forward_backward`; the loss is that of the last stage's ranks."""
        self._divisor = target_tokens
        return self._run(self._schedule.step, batch)

    def forward(self, batch: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Summed loss of a batch, float64; zero on all ranks but those of the last stage."""
        self._divisor = 1.0
        return self._run(self._schedule.eval, batch)

    def _run(self, run: Callable, batch: list[tuple[Tensor, Tensor]]) -> Tensor:
        args, kwargs, losses = (), {}, []
        if self._first:
            args = (torch.cat([inputs for inputs, _ in batch]),)
        if self._last:
            targets = torch.cat([targets for _, targets in batch])
            kwargs = {"targets": targets, "target": targets, "losses": losses}
        try:
            run(*args, return_outputs=False, **kwargs)
        except RuntimeError as error:
            # torch wraps what fails within a stage; a lost rank or a full device is to be seen.
            raise error.__cause__ or error from None
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            total += loss.detach()
        return total
