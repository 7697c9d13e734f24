"""--grad-compression: the sum that is sent, what it loses, and that nothing else is lost."""

import collections
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallel import grad_compression
from parallel.grad_compression import replicate
from parallel.options import ParallelOptions
from planner.collectives import collectives
from recipes.compare_layouts.judge import SENT_ROUNDOFF, Lossy
from tests.ranks import free_port
from tests.runs import SMALL, curve, run_main, train
from tests.toy import (
    SEQ_LEN,
    deviation,
    full,
    local_batch,
    make_layout,
    make_model,
    make_ranks,
    one_step,
    train_toy,
)
from training.config.schema import OptimizerSection
from training.optimizers.sharded import ShardedOptimizer
from training.step import Engine

# Wide enough that two factors of rank 32 are less than half of most of its matrices.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 256}


def compressed(compression: str, **options):
    return train_toy(zero=0, memory={"grad_compression": compression}, **options)


def uncompressed(hook: str, **options):
    """Train with the hook of a compression, told to lose nothing."""
    same = {"bf16": (torch.float64, 1.0), "fp16": (torch.float64, 2.0**10)}
    with (
        mock.patch.object(grad_compression, "SENT_AS", same),
        mock.patch.object(grad_compression, "POWERSGD_START", 1000),
        mock.patch.object(grad_compression, "BUCKET_MB", 0.03),
    ):
        return compressed(hook, **options)


@pytest.mark.parametrize(
    ("hook", "micro_batches", "shared"),
    [
        ("bf16", 2, {"mask": "uneven"}),
        ("fp16", 1, {"tie_word_embeddings": True, "mask": "empty"}),
        ("powersgd", 2, {"optimizer": {"optimizer": "adamw", "lr": 1e-2}}),
    ],
)
def test_the_sum_is_that_of_one_process(hook, micro_batches, shared, ranks1, ranks4):
    expected = ranks1.run(train_toy, **shared)[0]
    found = ranks4.run(uncompressed, hook, micro_batches=micro_batches, **shared)[0]
    assert deviation(found, expected) < 1e-10


@pytest.mark.parametrize("compression", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_sixteen_bits_lose_what_they_must(compression, dtype, ranks1, ranks4):
    shared = {"mask": "uneven", "dtype": dtype}
    expected = ranks1.run(train_toy, **shared)[0]
    found = ranks4.run(compressed, compression, micro_batches=2, **shared)[0]
    # What is computed before the first sum is not touched.
    assert found["loss"][0] == pytest.approx(expected["loss"][0], rel=1e-6)
    bound, u = Lossy(compression, 4).bound, SENT_ROUNDOFF[compression]
    for name, b in expected["grads"].items():
        lost = np.linalg.norm(found["grads"][name] - b) / np.linalg.norm(b)
        assert u / 16 < lost < bound(1, "gradients"), name
    for step in range(1, 5):
        for key in ("loss", "grad_norm"):
            a, b = found[key][step], expected[key][step]
            assert 0 < abs(a - b) / b < bound(step + 1, key)


def test_small_gradients_do_not_end_at_those_of_float16(ranks4):
    """A loss of a billionth gives gradients far below 6e-8."""
    lost = ranks4.run(sum_of_small_numbers)
    assert max(lost) < 2.0**-10


def sum_of_small_numbers() -> float:
    parts = torch.randn(4, 1000, dtype=torch.float64, generator=torch.manual_seed(0)) * 1e-6

    class Bucket:
        def buffer(self):
            return parts[dist.get_rank()].clone()

    sent_as = grad_compression.SENT_AS["fp16"]
    found = grad_compression.sum_in_16_bits(sent_as, Bucket()).wait()
    return float((found - parts.sum(0)).norm() / parts.sum(0).norm())


def test_bfloat16_computes_as_fsdp_does(ranks4):
    """The same numbers but for the gradients of the embedding and those that are sent."""
    shared = {"dtype": "bfloat16", "micro_batches": 2}
    sharded = ranks4.run(train_toy, zero=0, **shared)[0]
    memory = {"grad_compression": "fp16", "activation_checkpoint": "full"}
    found = ranks4.run(train_toy, zero=0, memory=memory, **shared)[0]
    assert found["loss"][0] == sharded["loss"][0]
    assert found["loss"] == pytest.approx(sharded["loss"], rel=2e-3)
    assert found["grad_norm"] == pytest.approx(sharded["grad_norm"], rel=2e-3)
    assert {w.dtype for w in found["weights"].values()} == {np.dtype("float32")}


def memorise(compression: str, steps: int) -> tuple[list[float], bytes]:
    """Train on one batch again and again; the losses, and this rank's weights."""
    ranks = make_ranks(1, zero=0)
    memory = {"grad_compression": compression}
    model = make_model(ranks, zero=0, dtype="float32", memory=memory, **WIDE)
    optimizer = ShardedOptimizer(model, OptimizerSection())
    with mock.patch.object(grad_compression, "BUCKET_MB", 0.2):
        trained = replicate(model, compression)
    batch, losses = local_batch(0, ranks, 1, 256, "none"), []
    engine = Engine(trained, optimizer, make_layout(1, zero=0), ranks)
    for step in range(1, steps + 1):
        result = one_step(engine, batch, step=step, lr=1e-3)
        losses.append(result.loss.item())
    return losses, b"".join(full(p).tobytes() for p in model.parameters())


def test_powersgd_learns_and_its_ranks_stay_equal(ranks4):
    whole = ranks4.run(memorise, "none", 20)[0][0]
    found = ranks4.run(memorise, "powersgd", 20)
    losses = found[0][0]
    assert len({weights for _, weights in found}) == 1
    # The first gradient that is compressed is the third, and shows in the fourth loss.
    assert losses[:3] == pytest.approx(whole[:3], rel=1e-6)
    assert abs(losses[3] / whole[3] - 1) > 1e-6
    assert losses[-1] < whole[-1] + 0.05 * whole[0]


def missed(feedback: bool) -> float:
    """Of 30 times the same gradient, the part that factors of rank 2 have not brought."""
    mine = torch.randn(24, 16, dtype=torch.float64, generator=torch.manual_seed(dist.get_rank()))
    state = grad_compression.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, use_error_feedback=feedback
    )
    whole, total = mine.clone(), torch.zeros_like(mine)
    dist.all_reduce(whole)
    for _ in range(30):
        gradient = mine.clone()
        bucket = mock.Mock()
        bucket.buffer.return_value, bucket.index.return_value = gradient.view(-1), 0
        bucket.gradients.return_value, bucket.is_last.return_value = [gradient], True
        grad_compression.sum_low_rank(state, bucket)
        total += gradient
    return float((total / 30 - whole).norm() / whole.norm())


def test_error_feedback_brings_what_was_missed(ranks2):
    assert max(ranks2.run(missed, True)) < 0.3 < 0.6 < min(ranks2.run(missed, False))


def run_in_buckets(argv: list[str], port: int):
    """Run train_llm.main() with gradients in several buckets, as those of a larger model are."""
    with mock.patch.object(grad_compression, "BUCKET_MB", 0.02):
        return run_main(argv, port)


def train_in_buckets(group, run_dir, *flags) -> str:
    argv = [*SMALL, "--run-dir", str(run_dir), *map(str, flags)]
    results = group.run(run_in_buckets, argv, free_port())
    assert {code for code, _ in results} == {0}
    return results[0][1]


def test_a_resumed_run_is_the_same_and_any_layout_goes_on(launched4, fresh, tmp_path):
    flags = ["--dtype", "float32", "--lr-decay-steps", 6, "--zero", 0, "--micro-batch-size", 1]
    flags += ["--grad-compression", "bf16"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_in_buckets(launched4, whole, *flags, "--steps", 6)
    train_in_buckets(launched4, parts, *flags, "--steps", 2)
    text = train_in_buckets(launched4, parts, *flags, "--steps", 4)
    assert "gradients are sent as bf16" in text
    assert curve(parts) == curve(whole)[:4]
    # On to tensor parallelism with shards, which sends gradients whole, and back.
    sharded = ["--dtype", "float32", "--lr-decay-steps", 6, "--tp", 2]
    train(fresh(4), parts, *sharded, "--steps", 5)
    assert curve(parts)[4][1] == pytest.approx(curve(whole)[4][1], rel=1e-5)
    train_in_buckets(launched4, parts, *flags, "--steps", 6)
    bound = Lossy("bf16", 4).bound(6, "loss")
    assert curve(parts)[5][1] == pytest.approx(curve(whole)[5][1], rel=bound)


def test_a_resumed_powersgd_run_says_what_it_has_lost(launched2, tmp_path):
    flags = ["--hidden-size", 128, "--intermediate-size", 256, "--zero", 0, "--lr-decay-steps", 4]
    flags += ["--grad-compression", "powersgd"]
    assert "error feedback" not in train(launched2, tmp_path / "run", *flags, "--steps", 3)
    assert "error feedback begins at zero" in train(
        launched2, tmp_path / "run", *flags, "--steps", 4
    )


def count_step(compression: str, fields: dict):
    """What the fourth optimizer step sends, and what the plan says."""
    ranks = make_ranks(1, zero=0)
    memory = {"grad_compression": compression}
    model = make_model(ranks, zero=0, dtype="float32", memory=memory, **fields)
    optimizer = ShardedOptimizer(model, OptimizerSection())
    layout = make_layout(1, zero=0, micro_batches=2)
    engine = Engine(replicate(model, compression), optimizer, layout, ranks)
    found, send = collections.Counter(), dist.all_reduce

    def counted(tensor, *args, **options):
        found["all_reduce", tensor.numel() * tensor.element_size()] += 1
        return send(tensor, *args, **options)

    for step in range(4):
        batch = local_batch(step, ranks, 2, model.config.vocab_size, "none")
        found.clear()
        # Of a hook's collectives some start in callbacks on other threads, where no dispatch mode
        # sees them.
        with mock.patch.object(dist, "all_reduce", counted):
            one_step(engine, batch, step=step + 1, lr=1e-3)
    planned = collections.Counter({("all_reduce", 16): 1})
    options = ParallelOptions(dtype="float32", grad_compression=compression)
    for row in collectives(model.config, layout, options, SEQ_LEN):
        planned[row.kind, row.bytes] += row.count
    return found, planned, 4 * model.config.num_parameters


@pytest.mark.parametrize(
    ("compression", "fields"),
    [("bf16", {}), ("fp16", {"tie_word_embeddings": True}), ("powersgd", WIDE)],
)
def test_what_is_sent_is_the_plan(compression, fields, ranks2):
    for found, planned, whole in ranks2.run(count_step, compression, fields):
        assert found == planned
        assert sum(size * n for (_, size), n in found.items()) <= 0.6 * whole


def test_one_process_sends_nothing_and_loses_nothing(launched1, tmp_path):
    argv = ["--steps", 2, "--zero", 0]
    train(launched1, tmp_path / "a", *argv)
    train(launched1, tmp_path / "b", *argv, "--grad-compression", "fp16")
    assert curve(tmp_path / "a") == curve(tmp_path / "b")


def test_names_have_no_wrapper(ranks2):
    assert ranks2.run(names_of_parameters) == [(True, True)] * 2


def names_of_parameters() -> tuple[bool, bool]:
    ranks = make_ranks(1, zero=0)
    model = make_model(ranks, zero=0, memory={"grad_compression": "bf16"})
    names = set(model.config.parameter_shapes)
    trained = replicate(model, "bf16")
    return set(dict(model.named_parameters())) == names, trained.lm_head is model.lm_head
