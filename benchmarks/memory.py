"""What a rank holds, measured beside the formula: parameters, gradients and optimizer state of each
ZeRO stage, and the activations that a forward keeps; exit code 1 where they differ.

    python -m benchmarks.memory

The debug recipe's model on the CPU, float32, AdamW. The stages are those of four processes and two
micro-batches; activations do not depend on dp, and are those of one process for each tp rank.
"""

import math
import sys
import time
from unittest import mock

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from benchmarks.ranks import run_ranks, write_json
from common.text import columns
from models.config import LlamaConfig
from models.decoder import Llama
from models.initialization import init_weights
from parallel import parallelize
from parallel.launch import Launch
from parallel.layout import Dims, Layout, make_layout
from parallel.mesh import Ranks, init_ranks
from parallel.options import ParallelOptions
from planner.memory import Options, holding, micro_batch_bytes, stage_bytes
from recipes.plan.measure import LiveBytes, gathered_parameters, stored
from training.config.command_line import load_recipe
from training.config.schema import OptimizerSection
from training.optimizers.sharded import ShardedOptimizer
from training.step import Engine, batch_loss, forward_backward

FLOAT = 4
WHEN = ("between micro-batches", "at the peak")
WHAT = ("parameters", "gradients", "optimizer")
SEQ_LEN = 256


def formula(config: LlamaConfig, zero: int, n: int) -> dict[str, tuple[int, int, int]]:
    """Bytes of parameters, gradients and optimizer state of one of ``n`` dp ranks, by moment.

    P bytes of parameters, E of the embedding, B of a block and H of norm and head, where n divides
    every matrix:

    - ZeRO-3: P/n each of parameters and gradients; in the backward a block is whole: + B each;
    - ZeRO-2: the backward starts with all gathered that it reads, + P - E, and the gradients of the
      head, + H; where a block is larger, most is held one unit later: + P - E - H and + B;
    - ZeRO-1: within a step P/n + P of parameters and P of gradients;
    - ZeRO-0: the same with n = 1: FSDP2 computes with a copy of a shard that is whole.

    AdamW's state is twice the shards.
    """
    numel = {name: math.prod(shape) for name, shape in config.parameter_shapes.items()}
    p = FLOAT * sum(numel.values())
    block = FLOAT * sum(size for name, size in numel.items() if ".layers.0." in name)
    head = FLOAT * (numel["model.norm.weight"] + numel["lm_head.weight"])
    part = p // (1 if zero == 0 else n)
    read = p - FLOAT * numel["model.embed_tokens.weight"]
    late = max((read, head), (read - head, block), key=sum)
    between, peak = {
        3: ((part, part), (part + block, part + block)),
        2: ((part, part), (part + late[0], part + late[1])),
        1: ((part + p, p), (part + p, p)),
        0: ((part + p, p), (part + p, p)),
    }[zero]
    return {WHEN[0]: (*between, 2 * part), WHEN[1]: (*peak, 2 * part)}


def _held(model: Llama, optimizer: ShardedOptimizer) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state, in parts and whole, held now."""
    now = stored(model, optimizer)
    return now.parameters + now.gathered, now.gradients + now.whole_gradients, now.optimizer


class _Watched(list):
    """Micro-batches; calls ``between`` before each but the first."""

    def __init__(self, batches, between):
        super().__init__(batches)
        self._between = between

    def __iter__(self):
        for i, batch in enumerate(super().__iter__()):
            if i:
                self._between()
            yield batch


def measure(config: LlamaConfig, layout: Layout, ranks: Ranks, seq_len: int) -> dict:
    """As :func:`formula`, measured in a forward and backward of two micro-batches."""
    zero = layout.zero
    with torch.device("meta"):
        model = Llama(config)
    parallelize(model, ranks.mesh, ParallelOptions(dtype="float32"), zero=zero)
    model.to_empty(device=ranks.device)
    init_weights(model, 0)
    optimizer = ShardedOptimizer(model, OptimizerSection())
    found, moments = {}, []
    tokens = torch.randint(0, config.vocab_size, (layout.micro_batch_size, seq_len + 1))
    pair = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    batch = _Watched([pair] * 2, lambda: found.update({WHEN[0]: _held(model, optimizer)}))
    real = FSDPParamGroup.post_backward

    def sampled(group, *args, **kwargs):
        # The gradients of a unit are whole, and its parameters still gathered.
        moments.append(_held(model, optimizer))
        return real(group, *args, **kwargs)

    with mock.patch.object(FSDPParamGroup, "post_backward", sampled):
        forward_backward(Engine(model, optimizer, layout, ranks), batch, 1)
    return found | {WHEN[1]: max(moments, key=lambda moment: sum(moment[:2]))}


def activation_formula(
    config: LlamaConfig, tokens: int, tp: int, sequence_parallel: bool, mode: str
) -> int:
    """Bytes that a forward of float32 leaves for the backward, on the CPU: the planner's formula.

    Of one sequence of so many tokens, on a rank of ``tp``.
    """
    layout = Layout(dp=1, tp=tp, micro_batch_size=1, micro_batches=1)
    options = Options(
        seq_len=tokens,
        sequence_parallel=sequence_parallel,
        activation_checkpoint=mode,
        dtype="float32",
        cuda=False,
    )
    micro, (stage,) = micro_batch_bytes(config, layout, options), holding(config, (), mode).stages
    return stage_bytes(stage, micro) + micro.loss_kept


def activations(config: LlamaConfig, layout: Layout, ranks: Ranks, seq_len: int, **options) -> int:
    """As :func:`activation_formula`, measured: what a forward has made and still holds."""
    with torch.device("meta"):
        model = Llama(config)
    parallelize(model, ranks.mesh, ParallelOptions(dtype="float32", **options), zero=layout.zero)
    model.to_empty(device=ranks.device)
    init_weights(model, 0)
    tokens = torch.randint(0, config.vocab_size, (layout.micro_batch_size, seq_len))
    for _ in range(2):  # the first makes what stays, as the tables of RoPE
        batch_loss(model, tokens, tokens, ranks).backward()
    with LiveBytes() as live:
        loss = batch_loss(model, tokens, tokens, ranks)
        time.sleep(0.1)  # a thread of gloo lets go of what it has summed after the wait for it
        # FSDP2 makes a copy of the parameters on one dp rank, too.
        kept = live.now_without([*gathered_parameters(model), loss])
    loss.backward()
    return kept


def model_config() -> LlamaConfig:
    """The debug recipe's model."""
    config = load_recipe("debug").model
    config.vocab_size = 256
    return config


def measure_stage(launch: Launch, zero: int) -> dict:
    """:func:`measure` on this rank."""
    n = launch.world_size
    layout = make_layout(n, Dims(), global_batch_size=2 * n, micro_batch_size=1, zero=zero)
    return measure(model_config(), layout, init_ranks(launch, layout, 600), 64)


def measure_activations(launch: Launch, sequence_parallel: bool, mode: str) -> int:
    """:func:`activations` on this rank."""
    tp = launch.world_size
    layout = make_layout(tp, Dims(tp=tp), global_batch_size=1, micro_batch_size=1, zero=3)
    options = {"sequence_parallel": sequence_parallel, "activation_checkpoint": mode}
    return activations(model_config(), layout, init_ranks(launch, layout, 600), SEQ_LEN, **options)


def main() -> int:
    """Print both tables, and write them as JSON."""
    config, stages, kept = model_config(), [], []
    for zero in (3, 2, 1, 0):
        found, expected = run_ranks(measure_stage, 4, zero), formula(config, zero, 4)
        for when in WHEN:
            for what, m, f in zip(WHAT, found[when], expected[when], strict=True):
                stages.append((f"ZeRO-{zero}", when, what, m, f))
    for tp, sp in ((1, False), (2, False), (2, True), (4, False), (4, True)):
        for mode in ("none", "every-2", "full"):
            m = run_ranks(measure_activations, tp, sp, mode)
            f = activation_formula(config, SEQ_LEN, tp, sp, mode)
            kept.append((tp, "on" if sp else "off", mode, m, f))
    last = ("measured", "formula")
    print("\n".join(columns([("stage", "moment", "bytes per rank of", *last), *stages])) + "\n")
    print("\n".join(columns([("tp", "sequence parallel", "checkpointing", *last), *kept])))
    write_json("memory", {"stages": stages, "activations": kept})
    return int(any(m != f for *_, m, f in stages + kept))


if __name__ == "__main__":
    sys.exit(main())
