"""One step of the trainer as one rank of any world, on one process: what it holds and sends.

A process group that sends nothing stands for the others, and tensors without memory for the
weights; mesh, ``parallelize()``, FSDP2, pipeline and optimizer are those of a run.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining.stage import InferenceMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.decoder import Llama
from parallel import parallelize
from parallel.launch import Launch
from parallel.layout import Layout
from parallel.mesh import Ranks, make_mesh
from parallel.pipeline import Pipeline
from parallel.stages import SCHEDULES, Stage
from recipes.plan.measure import CountCollectives, LiveBytes, gathered_parameters, held
from training import setup as start
from training.config.schema import Config
from training.optimizers.sharded import ShardedOptimizer
from training.step import FaultFlag, batch_loss, optimizer_step


@dataclass(frozen=True)
class Traced:
    """What a rank does in a step.

    Attributes:
        held: bytes by what they are of.
        sent: number of collectives by mesh dim, kind and bytes of the whole tensor.
    """

    held: dict[str, int]
    sent: dict[tuple[str, str, int], int]


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, **_) -> Tensor:
    """The operation that a GPU chooses, for a causal mask that ends at the last key."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


@contextlib.contextmanager
def _operations_of(cuda: bool) -> Iterator[None]:
    if not cuda:
        yield
        return
    # torch chooses by the device, and without CUDA it has no fake tensors that can compute there.
    with mock.patch.object(F, "scaled_dot_product_attention", _flash_attention):
        yield


@contextlib.contextmanager
def fake_rank(layout: Layout, rank: int) -> Iterator[Ranks]:
    """A rank of a world of which only this process exists."""
    world = layout.world_size
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        mesh = make_mesh("cpu", layout)
        yield Ranks(Launch(rank, world, 0, 1), torch.device("cpu"), mesh, None, None)
    finally:
        dist.destroy_process_group()


def _agree_on_given_shapes(pipeline: Pipeline) -> None:
    """What the first messages of a pipeline settle, which do not arrive here."""

    def settle(stages, *_) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    pipeline._schedule._warmup_p2p = settle


def trace(config: Config, layout: Layout, pp_rank: int, blocks: int, *, cuda: bool) -> Traced:
    """One step, and one more forward, of the first rank at a coordinate of pp.

    Args:
        layout: its micro-batches are run.
        blocks: of each stage of the rank, or of the model.
        cuda: with CUDA's attention, and otherwise a CPU's. Nothing runs on either.
    """
    rank, seq_len = pp_rank * layout.world_size // layout.pp, config.step.seq_len
    stages = [
        Stage(stage.index, stage.count, pp_rank, range(i * blocks, (i + 1) * blocks))
        for i, stage in enumerate(layout.rank_stages(config.model, seq_len, pp_rank))
    ]
    short = config.model.model_copy(update={"num_hidden_layers": blocks * max(1, len(stages))})
    config = config.model_copy(update={"model": short})
    options = config.plan_options(cuda=cuda) | config.memory.model_dump()
    options["dtype"] = getattr(torch, config.step.dtype)
    with fake_rank(layout, rank) as ranks, _operations_of(cuda):
        with torch.device("meta"):
            model = Llama(short).to(start.parameter_dtype(config))
        parts = parallelize(model, ranks.mesh, zero=layout.zero, stages=stages, **options)
        # Not before: FSDP2 looks at numbers of its mesh, which fake tensors do not have.
        with FakeTensorMode(allow_non_fake_inputs=True):
            pipeline = start.make_pipeline(config, parts, stages, layout, ranks)
            if pipeline:
                _agree_on_given_shapes(pipeline)
            model.to_empty(device=ranks.device)
            optimizer = ShardedOptimizer(model, config.optimizer)
            tokens = torch.zeros((layout.batch_size, seq_len // layout.cp), dtype=torch.int64)
            traced = _step(model, optimizer, tokens, layout, ranks, pipeline)
            traced.held["kept by a micro-batch"] = _kept(parts, stages, tokens, options, ranks)
    return traced


def _step(
    model: Llama,
    optimizer: ShardedOptimizer,
    tokens: Tensor,
    layout: Layout,
    ranks: Ranks,
    pipeline: Pipeline | None,
) -> Traced:
    """One optimizer step."""
    moments, within = [], []
    backward = FSDPParamGroup.pre_backward

    def sampled(group, *args, **kwargs):
        # Between the backwards of two units.
        within.append(held(model, optimizer))
        return backward(group, *args, **kwargs)

    with CountCollectives() as counter, mock.patch.object(FSDPParamGroup, "pre_backward", sampled):
        optimizer_step(
            model, optimizer, [(tokens, tokens)] * layout.micro_batches, 1, ranks,
            zero=layout.zero, pipeline=pipeline, lr=1.0, grad_clip=1.0, step=1,
            fault=FaultFlag(ranks.device),
            while_reducing=lambda: moments.append(held(model, optimizer)),
        )  # fmt: skip
    (end,) = moments
    found = {
        "parameters": end.parameters, "gradients": end.gradients, "optimizer state": end.optimizer
    }  # fmt: skip
    if layout.zero <= 1:
        found["gathered parameters"] = max((moment.gathered for moment in within), default=0)
        # A schedule that splits the backward keeps gradients of weights in the compute dtype, too,
        # until its next backward.
        splits = SCHEDULES[layout.pp_schedule].splits_backward
        if layout.micro_batches > 1 and within and not splits:
            found["whole gradients"] = max((moment.whole_gradients for moment in within), default=0)
    return Traced(found, dict(counter.by_dim(ranks.mesh)))


def _kept(parts: list[Llama], stages: list[Stage], tokens: Tensor, options: dict, ranks) -> int:
    """Bytes that a micro-batch leaves for its backward in all stages of a rank.

    A stage that has others before it keeps what it has received, and one that has others after it
    what it has handed on.
    """
    batch, length = tokens.shape
    total = 0
    for part, stage in zip(parts, stages or [Stage(0, 1, 0, range(0))], strict=True):
        with LiveBytes() as live:
            x = tokens
            if not stage.first:
                shape = batch, length // part.model.sequence_shards, part.config.hidden_size
                x = torch.empty(shape, dtype=options["dtype"], requires_grad=True)
            out = batch_loss(part, x, tokens, ranks) if stage.last else part(x)
            # A loss is a number.
            others = [*gathered_parameters(part), *([out] if stage.last else [])]
            total += live.now_without(others)
    return total
