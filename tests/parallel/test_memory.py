"""Memory savers: what they change in memory, and that they change nothing else."""

import re
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from benchmarks import memory
from common.errors import LayoutError
from models.config import LlamaConfig
from models.weights import Weight
from parallel import activation_checkpoint
from parallel.data_parallel import fsdp_units
from parallel.launch import Launch
from parallel.layout import Layout
from parallel.mesh import init_ranks
from recipes.plan.measure import LiveBytes, gathered_parameters
from tests.ranks import free_port
from tests.runs import SMALL, rows, run_main
from tests.toy import (
    MODEL,
    SEQ_LEN,
    deviation,
    local_batch,
    make_layout,
    make_model,
    make_ranks,
    train_toy,
)
from training.config.schema import OptimizerSection
from training.optimizers.sharded import ShardedOptimizer
from training.step import batch_loss

SAVERS = {
    "full": {"activation_checkpoint": "full"},
    "every-2": {"activation_checkpoint": "every-2"},
    "prefetch": {"prefetch": 2},
    "no prefetch": {"prefetch": 0},
    "offload": {"cpu_offload": True},
}


@pytest.fixture(scope="module")
def plain(ranks4):
    """Runs without memory savers, each made once."""
    runs = {}

    def get(tp: int, **options):
        key = tp, repr(options)
        if key not in runs:
            runs[key] = ranks4.run(train_toy, tp, **options)[0]
        return runs[key]

    return get


def assert_bitwise_equal(found: dict, expected: dict) -> None:
    assert found["loss"] == expected["loss"] and found["grad_norm"] == expected["grad_norm"]
    for key in ("grads", "weights"):
        assert all(np.array_equal(found[key][n], expected[key][n]) for n in expected[key])


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize(
    ("tp", "options"),
    [
        (2, {"sp": True, "micro_batches": 2, "mask": "uneven"}),
        (1, {"zero": 1, "micro_batches": 2, "dtype": "float32", "tie_word_embeddings": True}),
        (4, {"num_key_value_heads": 1, "dtype": "bfloat16", "zero": 2}),
    ],
    ids=["2x2", "4x1", "1x4"],
)
def test_savers_are_bitwise_nothing(saver, tp, options, plain, ranks4):
    found = ranks4.run(train_toy, tp, memory=SAVERS[saver], **options)[0]
    assert_bitwise_equal(found, plain(tp, **options))


@pytest.mark.parametrize(
    ("checkpoint", "tp", "options"),
    [
        ("full", 2, {"sp": True, "micro_batches": 2, "mask": "uneven"}),
        ("every-2", 2, {"cp": 2, "sp": True}),
        ("none", 2, {"cp": 2}),
        ("every-2", 1, {"zero": 1, "micro_batches": 2, "dtype": "float32", "mask": "empty"}),
        ("none", 4, {"num_key_value_heads": 1, "dtype": "bfloat16", "zero": 2}),
    ],
    ids=["2x2", "cp2-sp", "cp2", "4x1", "1x4"],
)
def test_compiled_blocks_are_bitwise_the_same(checkpoint, tp, options, plain, ranks4):
    """Of forward and backward as torch.compile traces them, and before it fuses anything."""
    memory = {"activation_checkpoint": checkpoint, "compile": True}
    found = ranks4.run(train_toy, tp, memory=memory, **options)[0]
    assert_bitwise_equal(found, plain(tp, **options))


def train_compiled(backend: str, tp: int, **options) -> tuple[dict | None, dict]:
    """A run with compiled blocks, and how often torch compiled what."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    default, activation_checkpoint.COMPILE_BACKEND = activation_checkpoint.COMPILE_BACKEND, backend
    try:
        found = train_toy(tp, memory={"compile": True}, **options)
    finally:
        activation_checkpoint.COMPILE_BACKEND = default
    return found, {name: dict(counts) for name, counts in counters.items()}


def test_many_blocks_are_compiled_once(ranks2):
    """More blocks than torch compiles versions of one function before it gives up on it."""
    options = {"sp": True, "num_hidden_layers": 12, "micro_batches": 2, "steps": 2}
    for _, counts in ranks2.run(train_compiled, "aot_eager", 2, **options):
        assert counts["stats"]["unique_graphs"] == 1
        assert not counts.get("graph_break") and not counts.get("recompile_limit")


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_the_compiler_of_a_real_run(ranks1):
    """It fuses, and rounds in another order."""
    (expected,) = ranks1.run(train_toy)
    ((found, counts),) = ranks1.run(train_compiled, "inductor", 1)
    assert 0 < deviation(found, expected) < 1e-12
    assert counts["stats"]["unique_graphs"] == 1


def kept_by_a_compiled_block(mode: str) -> int:
    """Bytes that autograd keeps of a block for its backward, beside its parameters."""
    ranks, kept = make_ranks(1), {}
    memory = {"activation_checkpoint": mode, "compile": True}
    model = make_model(ranks, dtype="float32", memory=memory, zero=2, **BIG)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    block = model.model.layers["1"]
    run = block.run

    def watched(*inputs: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = run(*inputs)
        for p in block.parameters():
            kept.pop(p.to_local().untyped_storage().data_ptr(), None)
        return output

    block.run = watched
    batch_loss(model, *local_batch(0, ranks, 1, 64, "none")[0], ranks)
    return sum(kept.values())


def test_what_a_compiled_block_keeps(ranks1):
    """Block 1, which every-2 does not checkpoint."""
    none, every, full = (
        ranks1.run(kept_by_a_compiled_block, mode)[0] for mode in ("none", "every-2", "full")
    )
    stream = 8 * SEQ_LEN * 64 * 4
    assert stream <= full < 1.2 * stream
    assert full < 0.14 * none and every == none, (full, every, none)


def run_compiled(argv: list[str], port: int) -> tuple[int, str]:
    torch.compiler.reset()
    return run_main(argv, port)


def test_fingerprints_with_compiled_blocks(launched2, tmp_path):
    """All but the activations within a block."""
    records = {}
    for name, flags in ("plain", []), ("compiled", ["--compile"]):
        argv = [*SMALL, "--run-dir", str(tmp_path / name), "--tp", "2", "--dtype", "float64"]
        argv += ["--steps", "2", "--fingerprint-steps", "2", *flags]
        assert launched2.run(run_compiled, argv, free_port())[0][0] == 0
        records[name] = rows(tmp_path / name, "fingerprints.jsonl")
    assert len(records["plain"]) == len(records["compiled"]) == 14
    for found, expected in zip(records["compiled"], records["plain"], strict=True):
        assert (found["step"], found["stage"]) == (expected["step"], expected["stage"])
        inside = {
            n for n in expected["values"] if found["stage"] == "activations" and "layers" in n
        }
        assert found["values"].keys() == expected["values"].keys() - inside
        for name, values in found["values"].items():
            assert values == pytest.approx(expected["values"][name], rel=1e-10)


def offloaded_units() -> tuple[int, int]:
    """Units of an offloaded model whose shards FSDP2 keeps on the CPU, and all units."""
    units = fsdp_units(make_model(make_ranks(1), memory={"cpu_offload": True}))
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    policies = [group.offload_policy for group in groups if group]
    return sum(isinstance(policy, CPUOffloadPolicy) for policy in policies), len(policies)


def test_every_unit_is_offloaded(ranks2):
    """On a CPU the results cannot tell."""
    assert ranks2.run(offloaded_units) == [(5, 5)] * 2


def test_an_offloaded_run_without_a_gpu_is_refused():
    with pytest.raises(LayoutError) as caught:
        init_ranks(Launch(0, 1, 0, 1), Layout(1, 1, 8, 1), 1.0, cpu_offload=True)
    assert re.match(r"--cpu-offload on \S+, which has 0 GPUs: .*; leave it out$", str(caught.value))
    assert not dist.is_initialized()


def state_on_another_device() -> bool:
    """Whether the state of offloaded parameters is handed out as it is, and not as a copy."""
    # Of a kind of device that need not exist, since nothing is sent.
    mesh = DeviceMesh("cuda", [0], mesh_dim_names=("dp",), _init_backend=False, _rank=0)
    model = torch.nn.Linear(4, 2, bias=False)
    meta = TensorMeta(model.weight.shape, model.weight.stride(), torch.float32)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    model.weight = torch.nn.Parameter(DTensor(model.weight.detach(), spec, requires_grad=False))
    model.config, table = None, {"weight": Weight("weight", (2, 4), "column")}
    with mock.patch("training.optimizers.sharded.all_weights", lambda config: table):
        optimizer = ShardedOptimizer(model, OptimizerSection())
    (shard,) = optimizer.shards
    state = optimizer._inner.state[shard]
    named = optimizer.named_state()
    return all(
        named[f"weight.{key}"]._local_tensor.data_ptr() == state[key].data_ptr()
        for key in ("exp_avg", "exp_avg_sq")
    )


def test_a_checkpoint_is_loaded_into_offloaded_state(ranks1):
    assert ranks1.run(state_on_another_device) == [True]


@pytest.mark.parametrize("chunks", [3, 16, 100])
@pytest.mark.parametrize(
    ("tp", "options"),
    [
        (2, {"sp": True, "micro_batches": 2, "mask": "uneven", "vocab_size": 67}),
        (1, {"tie_word_embeddings": True, "mask": "empty"}),
        (4, {"vocab_size": 66}),
    ],
    ids=["2x2", "4x1", "1x4"],
)
def test_chunks_of_the_loss(chunks, tp, options, plain, ranks4):
    """The sum over tokens in another order: equal to rounding."""
    found = ranks4.run(train_toy, tp, memory={"loss_chunks": chunks}, **options)[0]
    assert deviation(found, plain(tp, **options)) < 1e-13


BIG = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}


def kept_by_the_forward(memory: dict) -> int:
    """Bytes that the blocks' forward keeps for their backward, beside their parameters."""
    ranks = make_ranks(1)
    model = make_model(ranks, dtype="float32", memory=memory, zero=2, **BIG)
    batch = local_batch(0, ranks, 1, 64, "none")[0]
    batch_loss(model, *batch, ranks).backward()  # what is made once is made here
    kept, parameters = [], gathered_parameters(model)
    for module in (model.model.layers["0"], model.lm_head):
        module.register_forward_pre_hook(lambda *_: kept.append(live.now_without(parameters)))
    with LiveBytes() as live:
        loss = batch_loss(model, *batch, ranks)
    loss.backward()
    return kept[1] - kept[0]


def test_what_activation_checkpointing_keeps(ranks1):
    """Full: the input of each block. Every-2: that of two of the four blocks, the others all."""
    (none,) = ranks1.run(kept_by_the_forward, {})
    (every,) = ranks1.run(kept_by_the_forward, SAVERS["every-2"])
    (full,) = ranks1.run(kept_by_the_forward, SAVERS["full"])
    stream = 8 * SEQ_LEN * 64 * 4
    assert 4 * stream <= full <= 8 * stream
    assert full < 0.2 * none and every == (none + full) // 2, (full, every, none)


def largest_logits(chunks: int) -> int:
    """Elements of the largest tensor whose last dim is the vocabulary."""
    ranks = make_ranks(1)
    model = make_model(ranks, memory={"loss_chunks": chunks}, vocab_size=101)
    batch = local_batch(0, ranks, 1, 101, "none")[0]
    with LiveBytes() as live:
        live.vocabulary = 101
        batch_loss(model, *batch, ranks).backward()
    return live.largest_vocabulary


def test_the_logits_of_one_chunk_exist(ranks1):
    assert ranks1.run(largest_logits, 1) == [8 * SEQ_LEN * 101]
    assert ranks1.run(largest_logits, 4) == [8 * SEQ_LEN // 4 * 101]


def stage_bytes(zero: int) -> tuple[dict, dict]:
    ranks = make_ranks(1, zero=zero)
    layout = make_layout(1, zero=zero)
    config = LlamaConfig(**(MODEL | BIG))
    found = memory.measure(config, layout, ranks, SEQ_LEN)
    return found, memory.formula(config, zero, layout.dp)


@pytest.mark.parametrize("zero", [3, 2, 1, 0])
def test_what_a_stage_holds(zero, ranks4):
    """Parameters, gradients and optimizer state, between micro-batches and at the peak."""
    for found, expected in ranks4.run(stage_bytes, zero):
        assert found == expected


def activation_bytes(sp: bool, mode: str) -> tuple[int, int]:
    ranks, config = make_ranks(2), LlamaConfig(**(MODEL | BIG))
    options = {"sequence_parallel": sp, "activation_checkpoint": mode}
    found = memory.activations(config, make_layout(2), ranks, SEQ_LEN, **options)
    tokens = make_layout(2).micro_batch_size * SEQ_LEN
    return found, memory.activation_formula(config, tokens, 2, sp, mode)


@pytest.mark.parametrize("mode", ["none", "every-2", "full"])
@pytest.mark.parametrize("sp", [False, True])
def test_what_a_forward_keeps(sp, mode, ranks2):
    for found, expected in ranks2.run(activation_bytes, sp, mode):
        assert found == expected
