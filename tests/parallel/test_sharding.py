"""Parity could be had by replicating everything: what is sharded, sent, and never exists."""

import collections
import math
import tracemalloc
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import communication
from models.config import LlamaConfig
from models.decoder import Llama
from models.initialization import CHUNK_ELEMENTS, init_weights
from parallel import parallelize
from parallel.context_parallel import local_positions
from parallel.launch import Launch
from parallel.layout import layout_flags, parse_layout
from parallel.options import ParallelOptions
from planner.collectives import collectives
from planner.print_plan import parameter_rows
from recipes.plan.measure import CountCollectives
from tests.toy import (
    MODEL,
    SEQ_LEN,
    full,
    local_batch,
    make_layout,
    make_model,
    make_ranks,
    one_step,
)
from training.config.command_line import parse_flags
from training.config.options import planner_options
from training.config.schema import OptimizerSection
from training.optimizers.sharded import ShardedOptimizer
from training.start import check
from training.step import Engine, batch_loss


def local_shapes(tp: int, **fields) -> dict:
    ranks = make_ranks(tp)
    model = make_model(ranks, **fields)
    return {row.name: (row.local_shape, row.bytes) for row in parameter_rows(model)}


def split(rows: int, parts: int, index: int) -> int:
    """Rows of one part: ceil(rows / parts) each, the last ones what remains."""
    size = -(-rows // parts)
    return max(0, min(rows - index * size, size))


@pytest.mark.parametrize("fields", [{}, {"vocab_size": 67}], ids=["even", "uneven"])
@pytest.mark.parametrize(("group", "tp"), [("ranks8", 4), ("ranks4", 1), ("ranks4", 4)])
def test_local_elements(group, tp, fields, request):
    ranks = request.getfixturevalue(group)
    dp, model = ranks.world_size // tp, MODEL | fields
    d, f, v = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    for rank, found in enumerate(ranks.run(local_shapes, tp, **fields)):
        at_dp, at_tp = divmod(rank, tp)
        rows = split(v, tp, at_tp)
        # Rows that tp cuts unevenly are cut over dp by columns.
        table = (split(rows, dp, at_dp), d) if v % tp == 0 else (rows, d // dp)
        expected = {
            "model.embed_tokens.weight": table,
            "lm_head.weight": table,
            "model.norm.weight": (d // dp,),
            "model.layers.1.input_layernorm.weight": (d // dp,),
            "model.layers.0.self_attn.q_proj.weight": (d // tp // dp, d),
            "model.layers.0.self_attn.v_proj.weight": (d // 2 // tp // dp, d),
            "model.layers.1.self_attn.o_proj.weight": (d // dp, d // tp),
            "model.layers.1.mlp.up_proj.weight": (f // tp // dp, d),
            "model.layers.0.mlp.down_proj.weight": (d // dp, f // tp),
        }
        for name, shape in expected.items():
            assert found[name] == (shape, 8 * int(np.prod(shape))), (rank, name)


def test_replicated_key_value_heads_are_sharded_over_dp_only(ranks8):
    found = ranks8.run(local_shapes, 4, num_key_value_heads=2)
    assert {f["model.layers.0.self_attn.k_proj.weight"][0] for f in found} == {(8 // 2, 32)}


TIED, L4 = {"tie_word_embeddings": True}, {"num_hidden_layers": 4}


def count_step(
    tp: int,
    sizes: dict,
    micro_batches: int,
    sp: bool,
    dtype: str,
    fields: dict,
    schedule: str,
    memory: dict,
):
    """What one optimizer step sends, and what the plan says."""
    ranks = make_ranks(tp, **sizes)
    layout = make_layout(tp, **sizes, micro_batches=micro_batches, schedule=schedule)
    options = {"zero": layout.zero, "dtype": dtype, "layout": layout, "memory": memory}
    model = make_model(ranks, sp=sp, **options, **fields)
    optimizer = ShardedOptimizer(model, OptimizerSection())
    engine, vocab = Engine(model, optimizer, layout, ranks, model.pipeline), model.config.vocab_size
    for step in (0, 1):
        batch = local_batch(step, ranks, micro_batches, vocab, "none")
        with CountCollectives() as counter:
            one_step(engine, batch, step=step + 1, lr=1e-3)
    stages = layout.rank_stages(model.config, SEQ_LEN, ranks.pp_rank)
    planned = collections.Counter({("all_reduce", 16): 1})  # loss and squared gradient norm
    options = ParallelOptions(sequence_parallel=sp, dtype=dtype, **memory)
    for row in collectives(model.config, layout, options, SEQ_LEN, stages):
        planned[row.kind, row.bytes] += row.count * row.units
    found = collections.Counter()
    for (_, kind, size), number in counter.counts.items():
        found[kind, size] += number
    return found, planned


@pytest.mark.parametrize(
    ("group", "tp", "sizes", "micro_batches", "sp", "dtype", "fields", "schedule"),
    [
        ("ranks8", 4, {}, 1, True, "float32", {}, ""),
        ("ranks4", 2, {}, 1, False, "float32", {}, ""),
        ("ranks4", 2, {"zero": 2}, 2, True, "float32", {}, ""),
        ("ranks4", 4, {}, 2, True, "float64", {"num_key_value_heads": 2}, ""),
        ("ranks4", 1, {}, 1, False, "float32", {"vocab_size": 65}, ""),
        ("ranks4", 1, {}, 2, False, "float32", TIED, ""),
        ("ranks4", 2, {}, 1, True, "bfloat16", {}, ""),
        ("ranks4", 2, {}, 1, True, "float32", TIED, ""),
        ("ranks1", 1, {}, 2, False, "float32", {}, ""),
        ("ranks8", 2, {"rep": 2}, 2, True, "float32", {}, ""),
        ("ranks8", 2, {"rep": 2, "zero": 1}, 2, False, "float32", TIED, ""),
        ("ranks4", 1, {"rep": 4, "zero": 2}, 2, False, "float32", {}, ""),
        ("ranks4", 2, {"zero": 1}, 2, True, "float32", {"num_key_value_heads": 1}, ""),
        ("ranks4", 1, {"zero": 0}, 2, False, "float32", {}, ""),
        ("ranks4", 2, {"zero": 0}, 2, True, "bfloat16", {}, ""),
        ("ranks4", 2, {"cp": 2}, 2, True, "float32", {}, ""),
        ("ranks8", 1, {"rep": 2, "zero": 2, "cp": 2}, 1, False, "float32", {"vocab_size": 65}, ""),
        ("ranks8", 4, {"zero": 1, "cp": 2}, 2, True, "float64", {"num_key_value_heads": 2}, ""),
        ("ranks8", 2, {"pp": 2}, 4, True, "float32", {"num_hidden_layers": 3}, "1f1b"),
        ("ranks4", 1, {"pp": 4}, 8, False, "float32", {"num_hidden_layers": 8}, "1f1b"),
        ("ranks4", 1, {"pp": 2, "zero": 2}, 4, False, "bfloat16", {}, "gpipe"),
        ("ranks4", 2, {"pp": 2, "zero": 1}, 4, False, "float32", {}, "1f1b"),
        ("ranks8", 1, {"pp": 2, "cp": 2}, 4, False, "float32", L4, "interleaved"),
        ("ranks8", 2, {"pp": 2, "zero": 1}, 4, True, "float32", L4, "zbv"),
        ("ranks4", 1, {"pp": 2, "zero": 0}, 4, False, "float32", L4, "dualpipev"),
    ],
)  # fmt: skip
def test_collectives_equal_the_plan(
    group, tp, sizes, micro_batches, sp, dtype, fields, schedule, request
):
    ranks = request.getfixturevalue(group)
    args = tp, sizes, micro_batches, sp, dtype, fields, schedule or "1f1b"
    for found, planned in ranks.run(count_step, *args, {}):
        assert found == planned


@pytest.mark.parametrize(
    ("tp", "sizes", "sp", "memory"),
    [
        (2, {}, True, {"activation_checkpoint": "full", "loss_chunks": 3}),
        (2, {"pp": 2, "zero": 1}, False, {"activation_checkpoint": "full", "loss_chunks": 2}),
        (2, {"cp": 2}, False, {"activation_checkpoint": "full"}),
        (2, {}, True, {"activation_checkpoint": "every-2"}),
        (2, {"cp": 2}, False, {"activation_checkpoint": "every-2"}),
        (1, {"pp": 2}, False, {"activation_checkpoint": "every-2"}),
    ],
)
def test_collectives_with_memory_savers_equal_the_plan(tp, sizes, sp, memory, ranks4):
    micro_batches = 4 if "pp" in sizes else 2
    args = tp, sizes, micro_batches, sp, "float32", {}, "1f1b", memory
    for found, planned in ranks4.run(count_step, *args):
        assert found == planned


@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("name", ["1x1", "2x4", "rep2-dp2-tp2", "dp2-cp2-tp2", "pp2-dp2-tp2"])
def test_the_plan_is_the_least_that_can_be_sent(name, mode):
    """Counts and bytes of benchmarks.communication, worked out apart from the plan."""
    sizes = parse_layout(name)
    flags = [*communication.MODEL, *layout_flags(name), "--sequence-parallel", mode]
    config = parse_flags(flags)
    layout = check(config, Launch(0, math.prod(sizes.values()), 0, 1))
    planned = collections.Counter(
        {("all", "all_reduce", "count"): 1, ("all", "all_reduce", "bytes"): 16}
    )
    seq_len, options = config.step.seq_len, planner_options(config, cuda=False)
    stages = layout.rank_stages(config.model, seq_len, 0)
    for row in collectives(config.model, layout, options, seq_len, stages):
        planned[row.dim, row.kind, "count"] += row.count * row.units
        planned[row.dim, row.kind, "bytes"] += row.count * row.units * row.bytes
    assert communication.minimum(flags, sizes) == planned


class NoWholeVocabulary(TorchDispatchMode):
    """Fails at a plain tensor that has the whole vocabulary in one dim."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.vocab_size, self.seen = vocab_size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and not isinstance(t, DTensor):
                assert self.vocab_size not in t.shape, f"{func} made {tuple(t.shape)}"
                self.seen += 1
        return out


def step_without_whole_vocabulary(tp: int, vocab_size: int, tied: bool) -> int:
    ranks = make_ranks(tp)
    model = make_model(ranks, vocab_size=vocab_size, tie_word_embeddings=tied)
    with NoWholeVocabulary(vocab_size) as watch:
        for inputs, targets in local_batch(0, ranks, 1, vocab_size, "none"):
            batch_loss(model, inputs, targets, ranks).backward()
    return watch.seen


@pytest.mark.parametrize("tied", [False, True])
def test_no_tensor_has_the_whole_vocabulary(tied, ranks4):
    # 101 is the size of nothing else; on one process the watch does see the logits.
    assert min(ranks4.run(step_without_whole_vocabulary, 2, 101, tied)) > 100


def test_the_watch_sees_a_whole_vocabulary(ranks1):
    with pytest.raises(AssertionError, match="made"):
        ranks1.run(step_without_whole_vocabulary, 1, 101, False)


def init_peak(tp: int) -> tuple[int, int, int]:
    """Bytes allocated by initialisation: its peak, and the local shards and one chunk."""
    ranks = make_ranks(tp)
    config = LlamaConfig(**(MODEL | {"vocab_size": 200_000, "hidden_size": 64, "head_dim": 8}))
    with torch.device("meta"):
        model = Llama(config)
    parallelize(model, ranks.mesh, ParallelOptions(dtype="float32"))
    model.to_empty(device="cpu")
    tracemalloc.start()  # numpy reports to it; the shards themselves exist already
    init_weights(model, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    table = config.vocab_size * config.hidden_size * 4
    return peak, 4 * CHUNK_ELEMENTS, table


def test_initialisation_allocates_a_chunk_at_most(ranks4):
    for peak, chunk, table in ranks4.run(init_peak, 2):
        assert peak < chunk + 2**18 < table


def weight_hash(tp: int, dtype: str, fields: dict) -> dict:
    ranks = make_ranks(tp)
    model = make_model(ranks, dtype=dtype, **fields)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings
    return {name: full(p).astype(np.float32).tobytes() for name, p in model.named_parameters()}


@pytest.mark.parametrize("fields", [{"vocab_size": 67}, {"tie_word_embeddings": True}])
def test_initial_weights_are_bitwise_the_same(fields, ranks1, ranks4, ranks8):
    expected = ranks1.run(weight_hash, 1, "float32", fields)[0]
    values = np.frombuffer(expected["model.layers.0.mlp.up_proj.weight"], np.float32)
    assert len(np.unique(values)) > 0.99 * len(values)
    assert (
        expected["model.layers.0.mlp.up_proj.weight"]
        != expected["model.layers.1.mlp.up_proj.weight"]
    )
    for group, tp in [(ranks4, 1), (ranks4, 2), (ranks4, 4), (ranks8, 2), (ranks8, 8)]:
        for found in group.run(weight_hash, tp, "float32", fields):
            assert found == expected
    assert ranks4.run(weight_hash, 2, "float64", fields)[0] == expected


def test_initial_standard_deviations():
    config = LlamaConfig(**(MODEL | {"hidden_size": 256, "vocab_size": 512}))
    model = Llama(config)
    init_weights(model, seed=1)
    std = (2 / (5 * 256)) ** 0.5
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(std, rel=0.02)
    assert model.lm_head.weight.std().item() == pytest.approx(std, rel=0.02)
    for block in model.model.layers.values():
        assert block.self_attn.q_proj.weight.std().item() == pytest.approx(std, rel=0.02)
        assert block.mlp.down_proj.weight.std().item() == pytest.approx(std / 2, rel=0.02)
        assert block.input_layernorm.weight.eq(1).all()


def changed_logits(tp: int, sp: bool, cp: int, position: int) -> tuple[bool, bool]:
    """Whether logits before ``position`` are bitwise unchanged when the token there changes, and
    whether all of those that this rank has from there on change."""
    ranks = make_ranks(tp, cp=cp)
    model = make_model(ranks, sp=sp, dtype="float32")
    inputs = local_batch(0, ranks, 1, 64, "none")[0][0]
    at = local_positions(SEQ_LEN // cp, cp, ranks.cp_rank) if cp > 1 else torch.arange(SEQ_LEN)
    other = torch.where(at == position, (inputs + 1) % 64, inputs)
    with torch.no_grad():
        same = (model(inputs) == model(other)).all(dim=-1)
    return bool(same[:, at < position].all()), not same[:, at >= position].any()


def changed_logits_of_a_pipeline(schedule: str, position: int) -> set[tuple[bool, bool]]:
    """As :func:`changed_logits`, of all micro-batches; nothing on ranks without logits."""
    ranks, sizes, found = make_ranks(1, pp=2, cp=2), {"pp": 2, "cp": 2, "zero": 1}, []

    def keep(part, inputs, targets, **_):
        found.append(part(inputs))
        return found[-1].sum()

    layout = make_layout(1, **sizes, micro_batches=4, schedule=schedule)
    with mock.patch("tests.toy.batch_loss", keep):
        model = make_model(ranks, zero=1, dtype="float32", layout=layout, num_hidden_layers=4)
    batch = local_batch(0, ranks, 4, 64, "none")
    at = local_positions(SEQ_LEN // 2, 2, ranks.cp_rank)
    other = [(torch.where(at == position, (x + 1) % 64, x), y) for x, y in batch]
    with torch.no_grad():
        model.pipeline.forward(batch)
        model.pipeline.forward(other)
    half = len(found) // 2
    assert half == (4 if ranks.pp_rank == layout.data_pp_ranks[-1] else 0)
    same = [(a == b).all(dim=-1) for a, b in zip(found[:half], found[half:], strict=True)]
    return {(bool(s[:, at < position].all()), not s[:, at >= position].any()) for s in same}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_causal_in_a_pipeline(schedule, ranks8):
    for position in (1, 9):
        found = ranks8.run(changed_logits_of_a_pipeline, schedule, position)
        assert set().union(*found) == {(True, True)}


@pytest.mark.parametrize(
    ("group", "tp", "sp", "cp"),
    [
        ("ranks1", 1, False, 1),
        ("ranks4", 1, False, 1),
        ("ranks4", 2, True, 1),
        ("ranks8", 8, False, 1),
        ("ranks4", 1, False, 4),
        ("ranks8", 2, True, 2),
    ],
)
def test_causal(group, tp, sp, cp, request):
    for position in (1, 7, 15):
        found = request.getfixturevalue(group).run(changed_logits, tp, sp, cp, position)
        assert set(found) == {(True, True)}


def train_and_keep_replicas(tp: int, sp: bool) -> dict:
    """Local bytes of the parameters that are replicated over tp, after 5 AdamW steps."""
    ranks = make_ranks(tp)
    model = make_model(ranks, sp=sp, dtype="float32", num_key_value_heads=1)
    optimizer = ShardedOptimizer(model, OptimizerSection(lr=1e-2))
    engine = Engine(model, optimizer, make_layout(tp), ranks)
    for step in range(5):
        one_step(engine, local_batch(step, ranks, 1, 64, "none"), step=step + 1, lr=1e-2)
    return {
        name: p.to_local().detach().numpy().tobytes()
        for name, p in model.named_parameters()
        if p.placements[-1].is_replicate()
    }


@pytest.mark.parametrize("sp", [False, True])
def test_replicas_stay_bitwise_equal(sp, ranks4):
    found = ranks4.run(train_and_keep_replicas, 2, sp)
    assert len(found[0]) == 2 * 2 + 1 + 2 * 2  # norms, and k and v of each block
    assert found[0] == found[1] and found[2] == found[3]
    assert found[0] != found[2]
