"""Small training runs, executed on every rank of a test group: what the tests compare."""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from models.config import LlamaConfig
from models.decoder import Llama
from models.initialization import init_weights
from parallel import activation_checkpoint, parallelize
from parallel.context_parallel import local_tokens
from parallel.grad_compression import replicate
from parallel.launch import Launch
from parallel.layout import Layout
from parallel.mesh import Ranks, make_mesh
from parallel.options import ParallelOptions
from parallel.pipeline import Pipeline
from planner.print_plan import parameter_rows
from training.config.schema import OptimizerSection
from training.data.batches import IGNORE_INDEX
from training.optimizers.sharded import ShardedOptimizer
from training.step import Batch, Engine, StepResult, batch_loss, forward_backward, update

# Eight heads, so that every layout of eight ranks divides them; four key/value heads, so that
# tp 8 has fewer of them than ranks.
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
GLOBAL_BATCH, SEQ_LEN = 8, 16
# Traces forward and backward as the real one does, and leaves them in torch's own operations.
activation_checkpoint.COMPILE_BACKEND = "aot_eager"


def make_layout(
    tp: int,
    *,
    cp: int = 1,
    rep: int = 1,
    zero: int = 3,
    micro_batches: int = 1,
    pp: int = 1,
    schedule: str = "1f1b",
) -> Layout:
    """The layout of all ranks of this process's group."""
    ranks = dist.get_world_size() // tp // cp // pp
    size = GLOBAL_BATCH // ranks // micro_batches
    dims = {"dp_replicate": rep, "cp": cp, "zero": zero, "pp": pp, "pp_schedule": schedule}
    return Layout(ranks // rep, tp, size, micro_batches, **dims)


@functools.cache
def make_ranks(tp: int, *, cp: int = 1, rep: int = 1, zero: int = 3, pp: int = 1) -> Ranks:
    """This process among the ranks of its group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = make_layout(tp, cp=cp, rep=rep, zero=zero, pp=pp)
    control = dist.new_group(backend="gloo")
    launch = Launch(rank, world, rank, world)
    return Ranks(launch, torch.device("cpu"), make_mesh("cpu", layout), control, dist.HashStore())


def make_model(
    ranks: Ranks,
    *,
    sp: bool = False,
    zero: int = 3,
    dtype: str = "float64",
    memory: dict | None = None,
    layout: Layout | None = None,
    **fields,
) -> Llama:
    """The toy model, laid out over ``ranks`` and initialised with seed 0.

    Its attribute ``pipeline`` runs the micro-batches; None without a pipeline.

    ``memory``: the memory savers among the :class:`parallel.options.ParallelOptions`.
    """
    compute = getattr(torch, dtype)
    options = ParallelOptions(sequence_parallel=sp, dtype=dtype, **(memory or {}))
    if memory and memory.get("compile"):
        torch.compiler.reset()  # what other runs of this process have compiled counts to a limit
    with torch.device("meta"):
        model = Llama(LlamaConfig(**(MODEL | fields)))
        model.to(torch.promote_types(compute, torch.float32))
    stages = layout.rank_stages(model.config, SEQ_LEN, ranks.pp_rank) if layout else []
    parts = parallelize(model, ranks.mesh, options, zero=zero, stages=stages)
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    model.pipeline = None
    if stages:
        loss = functools.partial(batch_loss, ranks=ranks)
        model.pipeline = Pipeline(
            parts, stages, layout, ranks, loss, seq_len=SEQ_LEN, dtype=compute
        )
    return model


def global_batch(step: int, vocab_size: int, mask: str = "none") -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets [G, S] of a step, the same on every rank.

    ``mask``: "uneven" leaves the second half of the sequences a tenth of the targets of the first;
    "empty" masks every target of step 1; "rank" every target of the second half.
    """
    random = np.random.Generator(np.random.Philox(key=[7, step]))
    tokens = random.integers(0, vocab_size, (GLOBAL_BATCH, SEQ_LEN + 1))
    tokens[0, :2] = 0, vocab_size - 1  # the last row of the vocabulary takes part
    inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    half = GLOBAL_BATCH // 2
    if mask == "uneven":
        targets[half:][random.random((half, SEQ_LEN)) > 0.1] = IGNORE_INDEX
    elif mask == "rank" or (mask == "empty" and step == 1):
        targets[0 if mask == "empty" else half :] = IGNORE_INDEX
    return inputs, targets


def local_batch(step: int, ranks: Ranks, micro_batches: int, vocab_size: int, mask: str) -> Batch:
    """The micro-batches of this dp rank."""
    sizes = dict(zip(ranks.mesh.mesh_dim_names, ranks.mesh.shape, strict=True))
    dp = ranks.launch.world_size // ranks.tp // ranks.cp // sizes.get("pp", 1)
    mine = slice(ranks.dp_rank * GLOBAL_BATCH // dp, (ranks.dp_rank + 1) * GLOBAL_BATCH // dp)
    parts = (np.split(x[mine], micro_batches) for x in global_batch(step, vocab_size, mask))
    return [
        tuple(local_tokens(torch.from_numpy(x), ranks.cp, ranks.cp_rank) for x in pair)
        for pair in zip(*parts, strict=True)
    ]


def full(tensor: torch.Tensor) -> np.ndarray:
    """The whole of a tensor as an array of its own."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone().numpy()


def whole(model: Llama, of: Callable[[torch.nn.Parameter], torch.Tensor]) -> dict:
    """A tensor for each parameter of the whole model, by name, also from other pipeline ranks."""
    here = {name: full(of(p)) for name, p in model.named_parameters()}
    if model.pipeline is None:
        return here
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, here)
    return {name: array for named in everyone for name, array in named.items()}


def one_step(
    engine: Engine,
    batch: Batch,
    target_tokens: int = GLOBAL_BATCH * SEQ_LEN,
    *,
    step: int,
    lr: float,
    grad_clip: float = 1.0,
) -> StepResult:
    """An optimizer step as the training loop makes it."""
    share = forward_backward(engine, batch, target_tokens)
    return update(engine, share, step=step, lr=lr, grad_clip=grad_clip)


def train_toy(
    tp: int = 1,
    *,
    cp: int = 1,
    rep: int = 1,
    zero: int = 3,
    pp: int = 1,
    schedule: str = "1f1b",
    steps: int = 5,
    micro_batches: int = 1,
    mask: str = "none",
    optimizer: dict | None = None,
    **options,
) -> dict | None:
    """Train the toy model. Rank 0 returns the curves, the gradients of step 0, the end weights, and
    how many elements of each parameter each rank holds.

    Every rank's loss and gradient norm must be the same number.
    """
    sizes = {"cp": cp, "rep": rep, "zero": zero, "pp": pp}
    ranks = make_ranks(tp, **sizes)
    layout = make_layout(tp, **sizes, schedule=schedule, micro_batches=micro_batches)
    model = make_model(ranks, zero=zero, layout=layout, **options)
    defaults = {"optimizer": "sgd", "lr": 0.3, "weight_decay": 0.1, "grad_clip": 0.5}
    section = OptimizerSection(**(defaults | (optimizer or {})))
    updater = ShardedOptimizer(model, section)
    grads, losses, norms, vocab = {}, [], [], model.config.vocab_size
    trained = replicate(model, (options.get("memory") or {}).get("grad_compression", "none"))
    engine = Engine(trained, updater, layout, ranks, model.pipeline)
    for step in range(steps):
        _, targets = global_batch(step, vocab, mask)
        target_tokens = int((targets != IGNORE_INDEX).sum())
        if not target_tokens:
            continue
        batch = local_batch(step, ranks, micro_batches, vocab, mask)
        share = forward_backward(engine, batch, target_tokens)
        grads = grads or whole(model, lambda p: p.grad)
        clip = section.grad_clip
        result = update(engine, share, step=step + 1, lr=section.lr, grad_clip=clip)
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    everyone = [None] * dist.get_world_size()
    elements = {row.name: math.prod(row.local_shape) for row in parameter_rows(model)}
    dist.all_gather_object(everyone, (losses, norms, elements))
    assert all(other[:2] == (losses, norms) for other in everyone)
    weights = whole(model, lambda p: p)
    if dist.get_rank() != 0:
        return None
    return {
        "loss": losses,
        "grad_norm": norms,
        "grads": grads,
        "weights": weights,
        "elements": [other[2] for other in everyone],
    }


def deviation(found: dict, reference: dict) -> float:
    """Largest relative deviation: of each number, and of each tensor in the Frobenius norm."""
    worst = 0.0
    for key in ("loss", "grad_norm"):
        a, b = np.array(found[key]), np.array(reference[key])
        assert a.shape == b.shape
        worst = max(worst, *np.abs(a - b) / np.abs(b))
    for key in ("grads", "weights"):
        assert found[key].keys() == reference[key].keys()
        for name, b in reference[key].items():
            worst = max(worst, np.linalg.norm(found[key][name] - b) / np.linalg.norm(b))
    return worst


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    """Random weights of a transformers model, wide enough that every part of it shows."""
    for name, p in model.named_parameters():
        if p.ndim == 1:
            p.uniform_(0.5, 1.5)
        else:
            p.normal_(std=0.3 if "proj" in name else 1.0)
