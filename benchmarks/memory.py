"""What a rank holds, measured beside the formula: parameters, gradients and optimizer state of each
ZeRO stage, and the activations that a forward keeps; exit code 1 where they differ by a tenth.

    torchrun --nproc-per-node 4 -m benchmarks.memory

The debug recipe's model on the CPU, float32, AdamW; two micro-batches for the stages.
"""

import json
import math
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.profiler import ProfilerActivity, profile

from models.config import LlamaConfig
from models.initialization import init_weights
from models.llama import Llama
from parallel import parallelize
from parallel.data_parallel import fsdp_units
from parallel.layout import Layout, make_layout, read_launch
from parallel.mesh import Ranks, init_ranks, make_mesh
from training.command_line import load_recipe
from training.config import OptimizerSection
from training.loop import batch_loss, forward_backward
from training.optimizer import ShardedOptimizer

FLOAT = 4
WHEN = ("between micro-batches", "at the peak")
WHAT = ("parameters", "gradients", "optimizer")
# (ZeRO stage, tp, sequence parallel, checkpointing); None: the stage itself is measured.
CASES = [(zero, 1, False, None) for zero in (3, 2, 1, 0)] + [
    (3, tp, sp, mode)
    for tp in (1, 2, 4)
    for sp in ((False, True) if tp > 1 else (False,))
    for mode in ("none", "selective", "full")
]


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


def _bytes(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.numel() * local.element_size()


def held(model: Llama, optimizer: ShardedOptimizer | None) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state that this rank holds now."""
    parameters = gradients = 0
    groups = (unit._get_fsdp_state()._fsdp_param_group for unit in fsdp_units(model))
    for group in dict.fromkeys(filter(None, groups)):  # norm and head are one
        for p in group.fsdp_params:
            parameters += _bytes(p.sharded_param)
            parameters += sum(t.untyped_storage().nbytes() for t in p.all_gather_outputs)
            whole = getattr(p, "_unsharded_param", None)
            grads = [
                p.sharded_param.grad,
                p.unsharded_accumulated_grad,
                getattr(whole, "grad", None),
            ]
            gradients += sum(_bytes(grad) for grad in grads if grad is not None)
    states = [t for t in optimizer.named_state().values() if t.ndim] if optimizer else []
    return parameters, gradients, sum(map(_bytes, states))


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
    parallelize(model, ranks.mesh, sequence_parallel=False, zero=zero, dtype=torch.float32)
    model.to_empty(device=ranks.device)
    init_weights(model, 0)
    optimizer = ShardedOptimizer(model, OptimizerSection())
    found, moments = {}, []
    tokens = torch.randint(0, config.vocab_size, (layout.batch_size, seq_len + 1))
    pair = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    batch = _Watched([pair] * 2, lambda: found.update({WHEN[0]: held(model, optimizer)}))
    real = FSDPParamGroup.post_backward

    def sampled(group, *args, **kwargs):
        # The gradients of a unit are whole, and its parameters still gathered.
        moments.append(held(model, optimizer))
        return real(group, *args, **kwargs)

    with mock.patch.object(FSDPParamGroup, "post_backward", sampled):
        forward_backward(model, batch, 1, ranks, zero)
    return found | {WHEN[1]: max(moments, key=lambda moment: sum(moment[:2]))}


def activation_formula(
    config: LlamaConfig, tokens: int, tp: int, sequence_parallel: bool, mode: str
) -> int:
    """Bytes that a forward of float32 leaves for the backward, on the CPU.

    With T tokens on a rank, D hidden, q, k and f the local widths of queries, keys and
    feed-forward, h local heads, V local rows of the vocabulary, and u the part of the stream that
    a rank keeps (1, or 1/tp with sequence parallelism), in elements:

    - a block: 4uTD and 2uT of the two norms (input, normalised input, 1/rms), 2TD of the inputs of
      its regions, (2q + 2k + h)T of the attention, 4fT of SwiGLU;
    - with full checkpointing: uTD, its input;
    - with selective checkpointing: that, the results of its matrix products, (q + 2k + 2f + 2D)T,
      of attention, (q + h)T, and of the collectives, 2TD, or 2TD + 2uTD with sequence parallelism;
    - the head: 2uTD and uT of the norm, TD, VT of the softmax, and 10 bytes a token of indices and
      masks; the embedding, if it is cut: 9 bytes a token.

    On CUDA, where the norm is one kernel, it keeps its input alone (not run).
    """
    d, head = config.hidden_size, config.head_size
    h = config.num_attention_heads // tp
    q, f, vocab = h * head, config.intermediate_size // tp, config.vocab_size // tp
    k = (config.kv_heads // tp if config.kv_heads % tp == 0 else 1) * head
    u = 1 / tp if sequence_parallel else 1
    sent = 0 if tp == 1 else (2 + 2 * u if sequence_parallel else 2) * d
    block = {
        "none": 4 * u * d + 2 * u + 2 * d + 2 * q + 2 * k + h + 4 * f,
        "full": u * d,
        "selective": u * d + q + 2 * k + 2 * f + 2 * d + q + h + sent,
    }[mode]
    ends = 2 * u * d + u + d + vocab
    masks = 10 + (9 if tp > 1 else 0)
    return round(tokens * (FLOAT * (config.num_hidden_layers * block + ends) + masks))


def activations(config: LlamaConfig, layout: Layout, ranks: Ranks, seq_len: int, **options) -> int:
    """As :func:`activation_formula`, measured: what is allocated by a forward and still held."""
    with torch.device("meta"):
        model = Llama(config)
    parallelize(model, ranks.mesh, zero=layout.zero, dtype=torch.float32, **options)
    model.to_empty(device=ranks.device)
    init_weights(model, 0)
    tokens = torch.randint(0, config.vocab_size, (layout.batch_size, seq_len))
    for _ in range(2):  # the first makes what stays, as the tables of RoPE
        batch_loss(model, tokens, tokens, ranks).backward()
    gathered = held(model, None)[0]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = batch_loss(model, tokens, tokens, ranks)
    allocated = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    gathered = held(model, None)[0] - gathered
    loss.backward()
    return allocated - gathered


def columns(rows: list[tuple]) -> str:
    """The rows as lines of aligned columns."""
    text = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in text
    )


def main() -> int:
    """Print both tables, and write them as JSON."""
    launch = read_launch()
    config = load_recipe("debug").model
    config.vocab_size = 256
    n, ranks, stages, kept = launch.world_size, None, [], []
    for zero, tp, sp, mode in CASES:
        layout = make_layout(world_size=n, tp=tp, global_batch_size=2 * n, batch_size=1, zero=zero)
        ranks = ranks or init_ranks(launch, layout, 600)
        mesh = make_mesh(ranks.device.type, layout)
        here = Ranks(launch, ranks.device, mesh, ranks.control, ranks.store)
        if mode is None:
            found, expected = measure(config, layout, here, 64), formula(config, zero, layout.dp)
            for when in WHEN:
                for what, m, f in zip(WHAT, found[when], expected[when], strict=True):
                    stages.append((f"ZeRO-{zero}", when, what, m, f, f"{m / f:.3f}"))
            continue
        options = {"sequence_parallel": sp, "activation_checkpoint": mode}
        m = activations(config, layout, here, 256, **options)
        f = activation_formula(config, layout.batch_size * 256, tp, sp, mode)
        kept.append((layout.name, "on" if sp else "off", mode, m, f, f"{m / f:.3f}"))
    if launch.rank == 0:
        last = ("measured", "formula", "ratio")
        print(columns([("stage", "moment", "bytes per rank of", *last), *stages]) + "\n")
        print(columns([("layout", "sequence parallel", "checkpointing", *last), *kept]))
        out = Path("runs/benchmarks/memory.json")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"stages": stages, "activations": kept}, indent=1) + "\n")
    dist.barrier(ranks.control)
    dist.destroy_process_group()
    return int(any(not 0.9 < float(row[-1]) < 1.1 for row in stages + kept))


if __name__ == "__main__":
    sys.exit(main())
