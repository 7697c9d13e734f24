"""What a rank holds, measured beside the formula: parameters, gradients and optimizer state of each
ZeRO stage, and the activations that a forward keeps; exit code 1 where they differ by a tenth.

    python -m benchmarks.memory

The debug recipe's model on the CPU, float32, AdamW. The stages are those of four processes and two
micro-batches; activations do not depend on dp, and are those of one process for each tp rank.
"""

import math
import sys
import weakref
from unittest import mock

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.ranks import run_ranks, write_json
from models.config import LlamaConfig
from models.initialization import init_weights
from models.llama import Llama
from parallel import parallelize
from parallel.data_parallel import fsdp_units
from parallel.layout import Launch, Layout, make_layout
from parallel.mesh import Ranks, init_ranks
from parallel.plan import columns
from planner.memory import Options, block_bytes, embedding_bytes, head_bytes, loss_bytes
from training.command_line import load_recipe
from training.config import OptimizerSection
from training.loop import batch_loss, forward_backward
from training.optimizer import ShardedOptimizer

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


def _bytes(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.numel() * local.element_size()


def held(model: Llama, optimizer: ShardedOptimizer) -> tuple[int, int, int]:
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
    states = [t for t in optimizer.named_state().values() if t.ndim]
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
    """Bytes that a forward of float32 leaves for the backward, on the CPU: the planner's formula.

    Of one sequence of so many tokens, on a rank of ``tp``.
    """
    layout = Layout(dp=1, tp=tp, batch_size=1, micro_batches=1)
    options = Options(tokens, sequence_parallel, mode, dtype_bytes=FLOAT, cuda=False)
    ends = embedding_bytes(layout, options) + head_bytes(config, layout, options)
    blocks = config.num_hidden_layers * block_bytes(config, layout, options)
    return ends + blocks + loss_bytes(config, layout, options)[0]


def activations(config: LlamaConfig, layout: Layout, ranks: Ranks, seq_len: int, **options) -> int:
    """As :func:`activation_formula`, measured: what a forward has made and still holds."""
    with torch.device("meta"):
        model = Llama(config)
    parallelize(model, ranks.mesh, zero=layout.zero, dtype=torch.float32, **options)
    model.to_empty(device=ranks.device)
    init_weights(model, 0)
    tokens = torch.randint(0, config.vocab_size, (layout.batch_size, seq_len))
    for _ in range(2):  # the first makes what stays, as the tables of RoPE
        batch_loss(model, tokens, tokens, ranks).backward()
    with LiveBytes() as live:
        loss = batch_loss(model, tokens, tokens, ranks)
        kept = live.now
    loss.backward()
    # FSDP2's copy of the parameters, which it makes on one dp rank too, is no activation.
    return kept - sum(map(_bytes, model.parameters()))


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that were made under it and are still alive; and their largest."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = self.largest_vocabulary = 0
        self._seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and type(t) is torch.Tensor:
                storage = t.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    size = storage.nbytes()
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata, size)
                if t.shape[-1:] == (self.vocabulary,):
                    self.largest_vocabulary = max(self.largest_vocabulary, t.numel())
        return out

    vocabulary = 0

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def model_config() -> LlamaConfig:
    """The debug recipe's model."""
    config = load_recipe("debug").model
    config.vocab_size = 256
    return config


def measure_stage(launch: Launch, zero: int) -> dict:
    """:func:`measure` on this rank."""
    n = launch.world_size
    layout = make_layout(world_size=n, tp=1, global_batch_size=2 * n, batch_size=1, zero=zero)
    return measure(model_config(), layout, init_ranks(launch, layout, 600), 64)


def measure_activations(launch: Launch, sequence_parallel: bool, mode: str) -> int:
    """:func:`activations` on this rank."""
    tp = launch.world_size
    layout = make_layout(world_size=tp, tp=tp, global_batch_size=1, batch_size=1, zero=3)
    options = {"sequence_parallel": sequence_parallel, "activation_checkpoint": mode}
    return activations(model_config(), layout, init_ranks(launch, layout, 600), SEQ_LEN, **options)


def main() -> int:
    """Print both tables, and write them as JSON."""
    config, stages, kept = model_config(), [], []
    for zero in (3, 2, 1, 0):
        found, expected = run_ranks(measure_stage, 4, zero), formula(config, zero, 4)
        for when in WHEN:
            for what, m, f in zip(WHAT, found[when], expected[when], strict=True):
                stages.append((f"ZeRO-{zero}", when, what, m, f, f"{m / f:.3f}"))
    for tp, sp in ((1, False), (2, False), (2, True), (4, False), (4, True)):
        for mode in ("none", "selective", "full"):
            m = run_ranks(measure_activations, tp, sp, mode)
            f = activation_formula(config, SEQ_LEN, tp, sp, mode)
            kept.append((tp, "on" if sp else "off", mode, m, f, f"{m / f:.3f}"))
    last = ("measured", "formula", "ratio")
    print("\n".join(columns([("stage", "moment", "bytes per rank of", *last), *stages])) + "\n")
    print("\n".join(columns([("tp", "sequence parallel", "checkpointing", *last), *kept])))
    write_json("memory", {"stages": stages, "activations": kept})
    return int(any(not 0.9 < float(row[-1]) < 1.1 for row in stages + kept))


if __name__ == "__main__":
    sys.exit(main())
