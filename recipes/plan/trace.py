"""One step of the trainer as one rank of any world, on one process: what it holds and sends.

A process group that sends nothing stands for the others, and tensors without memory for the
weights; mesh, ``parallelize()``, FSDP2, pipeline and optimizer are those of a run.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining.stage import InferenceMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.decoder import Llama
from parallel import parallelize
from parallel.data_parallel import fsdp_units
from parallel.launch import Launch
from parallel.layout import Layout
from parallel.mesh import Ranks, make_mesh
from parallel.pipeline import Pipeline
from parallel.stages import SCHEDULES, Stage
from recipes.plan.measure import CountCollectives, LiveBytes, gathered_parameters, stored
from training import setup
from training.config.options import planner_options
from training.config.schema import Config
from training.optimizers.sharded import ShardedOptimizer
from training.step import Engine, batch_loss, forward_backward, update


@dataclass(frozen=True)
class Traced:
    """What a rank does in a step.

    Attributes:
        held: bytes by what they are of.
        sent: number of collectives by mesh dim, kind and bytes of the whole tensor.
    """

    held: dict[str, int]
    sent: dict[tuple[str, str, int], int]


def _flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The operation that a GPU chooses, for a causal mask that ends at the last key.

    torch chooses by the device, and without CUDA it has no fake tensors that can compute there.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def _use_flash_attention(model: Llama) -> None:
    for block in model.model.layers.values():
        attend, flash = block.self_attn.attend, _flash_attention
        # With context parallelism, of each chunk to its prefix.
        chunked = isinstance(attend, functools.partial)
        block.self_attn.attend = functools.partial(attend, attention=flash) if chunked else flash


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
    options = planner_options(config, cuda)
    with fake_rank(layout, rank) as ranks:
        with torch.device("meta"):
            model = Llama(short).to(setup.parameter_dtype(config))
        parts = parallelize(model, ranks.mesh, options, zero=layout.zero, stages=stages)
        if cuda:
            _use_flash_attention(model)
        # Not before: FSDP2 looks at numbers of its mesh, which fake tensors do not have.
        with FakeTensorMode(allow_non_fake_inputs=True):
            pipeline = setup.make_pipeline(config, parts, stages, layout, ranks)
            if pipeline:
                _agree_on_given_shapes(pipeline)
            model.to_empty(device=ranks.device)
            optimizer = ShardedOptimizer(model, config.optimizer)
            tokens = torch.zeros((layout.micro_batch_size, seq_len // layout.cp), dtype=torch.int64)
            traced = _step(Engine(model, optimizer, layout, ranks, pipeline), tokens)
            kept = _kept(parts, stages, tokens, getattr(torch, config.step.dtype), ranks)
            traced.held["kept by a micro-batch"] = kept
    return traced


def _step(engine: Engine, tokens: Tensor) -> Traced:
    """One optimizer step."""
    model, optimizer, layout, within = engine.model, engine.optimizer, engine.layout, []

    def sample_before_backward(_, __, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: within.append(stored(model, optimizer)))

    # Norm and head are one unit, whose backward begins with the last of them.
    units = {unit._get_fsdp_state(): unit for unit in fsdp_units(model)}.values()
    hooks = [unit.register_forward_hook(sample_before_backward) for unit in units]
    with CountCollectives() as counter:
        share = forward_backward(engine, [(tokens, tokens)] * layout.micro_batches, 1)
        end = stored(model, optimizer)
        update(engine, share, step=1, lr=1.0, grad_clip=1.0)
    for hook in hooks:
        hook.remove()
    sizes = {"parameters": end.parameters, "gradients": end.gradients}
    sizes["optimizer state"] = end.optimizer
    if layout.zero <= 1:
        sizes["gathered parameters"] = max((moment.gathered for moment in within), default=0)
        # A schedule that splits the backward keeps gradients of weights in the compute dtype, too,
        # until its next backward.
        splits = SCHEDULES[layout.pp_schedule].splits_backward
        if layout.micro_batches > 1 and within and not splits:
            sizes["whole gradients"] = max((moment.whole_gradients for moment in within), default=0)
    return Traced(sizes, dict(counter.by_dim(engine.ranks.mesh)))


def _kept(
    parts: list[Llama], stages: list[Stage], tokens: Tensor, dtype: torch.dtype, ranks
) -> int:
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
                shape = batch, length // part.sequence_shards, part.config.hidden_size
                x = torch.empty(shape, dtype=dtype, requires_grad=True)
            out = batch_loss(part, x, tokens, ranks) if stage.last else part(x)
            # A loss is a number.
            others = [*gathered_parameters(part), *([out] if stage.last else [])]
            total += live.now_without(others)
    return total
