"""Planted faults: the verdict is a bug, and names the module or quantity that is wrong."""

import contextlib
import json
import sys
from unittest import mock

import numpy as np
import pytest
import torch

import parallel.context_parallel
import parallel.data_parallel
import parallel.pipeline
import parallel.tensor_parallel
import training.optimizers.sharded
import training.step
from parallel import grad_compression
from recipes.compare_layouts.judge import Lossy, judge, rounding_bound
from tests.ranks import free_port
from tests.runs import SMALL, run_main
from training.data.batches import IGNORE_INDEX, train_batch

FLAGS = "--steps 3 --fingerprint-steps 3 --dtype float64 --warmup-steps 0".split()  # noqa: SIM905


def uneven_masks():
    """Not a fault: masks that leave the second half of a batch fewer targets, on any layout."""

    def masked(data, step, **options):
        batch = train_batch(data, step, **options)
        share = options["global_batch_size"] // options["dp"]
        for k, (_, targets) in enumerate(batch):
            first = options["dp_rank"] * share + k * options["micro_batch_size"]
            for row in range(len(targets)):
                if first + row >= options["global_batch_size"] // 2:
                    targets[row, 3:] = IGNORE_INDEX
        return batch

    return mock.patch("training.loop.train_batch", masked)


def norm_gradient_not_reduced():
    original = parallel.tensor_parallel.Replicated._place

    def place(self, module, *args, **kwargs):
        original(self, module, *args, **kwargs)
        module.partial_grad = False

    return mock.patch.object(parallel.tensor_parallel.Replicated, "_place", place)


def loss_averaged_over_ranks():
    """Each dp rank divides by its own targets, and the ranks' means are averaged."""

    def averaged(engine, batch, target_tokens):
        mine = sum(int((targets != IGNORE_INDEX).sum()) for _, targets in batch)
        return original(engine, batch, mine * engine.ranks.mesh.shape[0])

    original = training.step.forward_backward
    return mock.patch("training.loop.forward_backward", averaged)


def layer_from_the_ranks_own_rng():
    def init(model, seed):
        original(model, seed)
        weight = model.model.layers["1"].mlp.up_proj.weight
        torch.manual_seed(torch.distributed.get_rank())
        with torch.no_grad():
            weight.to_local().normal_(std=0.1)

    import models.initialization

    original = models.initialization.init_weights
    return mock.patch("training.setup.init_weights", init)


def sampler_seeded_by_rank():
    def shuffled(data, step, *, seed, **options):
        rank = torch.distributed.get_rank()
        return train_batch(data, step, seed=seed + rank, **options)

    return mock.patch("training.loop.train_batch", shuffled)


def replicas_counted_tp_times():
    return mock.patch("training.optimizers.sharded.counts_here", lambda p: True)


def key_and_value_swapped():
    """On the last tp rank of each dp rank, in the second block."""
    import models.decoder
    import models.layers

    original = models.decoder.Llama.forward

    def forward(self, tokens, loss=None):
        attention = self.model.layers["1"].self_attn
        rank = torch.distributed.get_rank()
        if rank % 2 == 1 and not getattr(self, "swapped", False):
            self.swapped = True
            k, v = attention.k_proj, attention.v_proj
            k.register_forward_hook(lambda m, x, y: torch.nn.functional.linear(x[0], local(v)))
            v.register_forward_hook(lambda m, x, y: torch.nn.functional.linear(x[0], local(k)))
            # The hooks that record come after those that are planted here.
            for module in (k, v):
                hooks = module._forward_hooks
                hooks.move_to_end(next(reversed(hooks)), last=False)
        return original(self, tokens, loss)

    local = models.layers.local_weight
    return mock.patch.object(models.decoder.Llama, "forward", forward)


def division_off_on_the_root_only():
    original = parallel.data_parallel.fsdp_units

    def root_only(model):
        return original(model)[:1]

    return mock.patch("parallel.data_parallel.fsdp_units", root_only)


def context_sum_missed():
    """A rank keeps the gradient of its own keys and values from its own queries alone."""
    gather = parallel.context_parallel._GatherSequence

    def backward(ctx, grad):
        chunks, at = grad.chunk(2 * ctx.args[1], dim=-2), torch.distributed.get_rank() // 2
        return torch.cat((chunks[at], chunks[-1 - at]), dim=-2), None, None

    return mock.patch.object(gather, "backward", staticmethod(backward))


def gradient_divided_by_micro_batches():
    """As torch's schedules do unless told that the loss is a sum."""
    original = torch.distributed.pipelining.schedules._PipelineSchedule.__init__
    stage = parallel.pipeline._Stage

    def scaled(self, *args, **kwargs):
        original(self, *args, **{**kwargs, "scale_grads": True})

    def reduce(self, factor):
        self.scale_grads(factor)

    patches = contextlib.ExitStack()
    patches.enter_context(
        mock.patch.object(
            torch.distributed.pipelining.schedules._PipelineSchedule, "__init__", scaled
        )
    )
    patches.enter_context(mock.patch.object(stage, "perform_reduce_grad", reduce))
    return patches


def micro_batches_of_a_stage_swapped():
    """The last stage pairs the hidden states of a micro-batch with the targets of another."""
    original = parallel.pipeline.Pipeline._run

    def run(self, schedule, batch):
        return original(self, schedule, batch if self._first else batch[::-1])

    return mock.patch.object(parallel.pipeline.Pipeline, "_run", run)


def inner_micro_batch_dropped():
    """What replicas have reduced of earlier micro-batches is lost before the last."""
    original = parallel.data_parallel.begin_micro_batch

    def begin(model, *, zero, last):
        for unit in parallel.data_parallel.fsdp_units(model) if last else ():
            group = unit._get_fsdp_state()._fsdp_param_group
            if group:
                group._partial_reduce_output = None
        original(model, zero=zero, last=last)

    return mock.patch("training.step.begin_micro_batch", begin)


# name: (fault, flags of the run, is the batch masked unevenly, what the finding must hold)
FAULTS = {
    "norm": (
        norm_gradient_not_reduced,
        ["--sequence-parallel", "on"],
        False,
        "step 1, gradients: model.layers.0.input_layernorm.weight is",
    ),
    "loss": (loss_averaged_over_ranks, [], True, "step 1, loss is"),
    "init": (
        layer_from_the_ranks_own_rng,
        [],
        False,
        "step 1, weights: model.layers.1.mlp.up_proj.weight is",
    ),
    "sampler": (sampler_seeded_by_rank, [], False, "step 1, tokens: inputs is"),
    "grad_norm": (
        replicas_counted_tp_times,
        ["--sequence-parallel", "on"],
        False,
        "step 1, grad_norm is",
    ),
    "swap": (
        key_and_value_swapped,
        [],
        False,
        "step 1, activations: model.layers.1.self_attn.k_proj is",
    ),
    "division": (
        division_off_on_the_root_only,
        [],
        False,
        "step 1, gradients: model.embed_tokens.weight is",
    ),
    "context": (
        context_sum_missed,
        ["--cp", 2],
        False,
        "step 1, gradients: model.embed_tokens.weight is",
    ),
    "pipeline scale": (
        gradient_divided_by_micro_batches,
        ["--pp", 2],
        False,
        "step 1, gradients: model.embed_tokens.weight is",
    ),
    "pipeline order": (micro_batches_of_a_stage_swapped, ["--pp", 2], False, "step 1, loss is"),
    "replicas": (
        inner_micro_batch_dropped,
        ["--dp-replicate", 2, "--tp", 1, "--micro-batch-size", 1],
        False,
        "step 1, gradients: model.embed_tokens.weight is",
    ),
}


def run_with(fault, masked: bool, argv: list[str], port: int):
    """Run train_llm.main() with a fault planted in this rank."""
    with contextlib.ExitStack() as patches:
        if masked:
            patches.enter_context(uneven_masks())
        if fault:
            patches.enter_context(fault())
        return run_main(argv, port)


def record(group, run_dir, *flags, fault=None, masked=False):
    argv = [*SMALL, *FLAGS, "--run-dir", str(run_dir), *map(str, flags)]
    results = group.run(run_with, fault, masked, argv, free_port())
    assert {code for code, _ in results} == {0}
    return run_dir


@pytest.fixture(scope="module")
def references(launched1, tmp_path_factory):
    base = tmp_path_factory.mktemp("references")
    return {
        masked: record(launched1, base / str(masked), masked=masked) for masked in (False, True)
    }


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault(name, references, launched4, fresh, tmp_path):
    fault, flags, masked, expected = FAULTS[name]
    flags = flags if "--tp" in flags else ["--tp", 2, *flags]
    group = fresh(4) if {"--pp", "--cp", "--dp-replicate"} & set(flags) else launched4
    run = record(group, tmp_path / "2x2", *flags, fault=fault, masked=masked)
    (verdict,) = judge(references[masked], {"2x2": run})
    assert verdict.finding and verdict.finding.startswith(expected), verdict.finding
    assert "in the reference" in verdict.finding


@pytest.mark.parametrize(
    ("tp", "masked", "flags"),
    [
        (2, False, ["--sequence-parallel", "on"]),
        (2, True, ["--micro-batch-size", 2]),
        (1, True, ["--zero", 2]),
        (4, False, ["--sequence-parallel", "on", "--micro-batch-size", 4]),
        (4, True, []),
        (2, True, ["--cp", 2, "--sequence-parallel", "on", "--micro-batch-size", 2]),
        (1, False, ["--cp", 2, "--dp-replicate", 2, "--activation-checkpoint", "full"]),
        (2, True, ["--zero", 1, "--micro-batch-size", 2, "--activation-checkpoint", "every-2"]),
        (1, True, ["--pp", 2, "--activation-checkpoint", "full"]),
        (2, False, ["--pp", 2, "--sequence-parallel", "on", "--zero", 2]),
        (1, True, ["--pp", 2, "--cp", 2, "--pp-schedule", "gpipe"]),
    ],
)
def test_rounding_is_no_bug(tp, masked, flags, references, launched4, fresh, tmp_path):
    group = fresh(4) if {"--pp", "--cp", "--dp-replicate"} & set(flags) else launched4
    run = record(group, tmp_path / "run", "--tp", tp, *flags, masked=masked)
    (verdict,) = judge(references[masked], {"run": run})
    assert verdict.finding is None and verdict.deviation < 1e-12


def gradients_averaged():
    """The hook averages, and nothing makes it the sum again: Adam hides it from the loss."""

    def averaged(hook):
        def inner(state, bucket):
            bucket.buffer().div_(torch.distributed.get_world_size())
            return hook(state, bucket)

        return inner

    hooks = {name: getattr(grad_compression, name) for name in ("sum_in_16_bits", "sum_low_rank")}
    return mock.patch.multiple(grad_compression, **{k: averaged(v) for k, v in hooks.items()})


def gradients_not_compressed():
    def plain(state, bucket):
        buffer = bucket.buffer()
        work = torch.distributed.all_reduce(buffer, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    return mock.patch.multiple(grad_compression, sum_in_16_bits=plain, sum_low_rank=plain)


def rank_left_out():
    """The last rank's first parameter is not in the sum."""
    original = grad_compression.sum_in_16_bits

    def left_out(state, bucket):
        if torch.distributed.get_rank() == 3:
            bucket.gradients()[0].zero_()
        return original(state, bucket)

    return mock.patch.object(grad_compression, "sum_in_16_bits", left_out)


# Wide enough that PowerSGD has something to do.
WIDE = ["--hidden-size", 128, "--intermediate-size", 256, "--num-hidden-layers", 1]


@pytest.fixture(scope="module")
def wide_reference(launched1, tmp_path_factory):
    flags = [*WIDE, "--steps", 4, "--fingerprint-steps", 4]
    return record(launched1, tmp_path_factory.mktemp("wide"), *flags)


@pytest.mark.parametrize(
    ("compression", "fault", "expected"),
    [
        ("bf16", None, None),
        ("fp16", None, None),
        ("powersgd", None, None),
        ("bf16", gradients_averaged, "step 1, gradients: model.embed_tokens.weight is"),
        ("fp16", gradients_averaged, "step 1, gradients: model.embed_tokens.weight is"),
        ("powersgd", gradients_averaged, "step 1, gradients: model.embed_tokens.weight is"),
        ("bf16", rank_left_out, "step 1, gradients: lm_head.weight is"),
        ("fp16", replicas_counted_tp_times, "step 1, grad_norm is"),
        ("bf16", gradients_not_compressed, "step 1, gradients: all are equal"),
        ("powersgd", gradients_not_compressed, "step 3, gradients: all are equal"),
        ("fp16", sampler_seeded_by_rank, "step 1, tokens: inputs is"),
    ],
)
def test_compressed_gradients(compression, fault, expected, wide_reference, launched4, tmp_path):
    flags = [*WIDE, "--steps", 4, "--fingerprint-steps", 4, "--zero", 0]
    flags += ["--grad-compression", compression]
    run = record(launched4, tmp_path / "run", *flags, fault=fault)
    (verdict,) = judge(wide_reference, {"4x1": run}, {"4x1": Lossy(compression, 4)})
    if fault:
        assert verdict.finding and verdict.finding.startswith(expected), verdict.finding
    else:
        assert verdict.finding is None
        assert verdict.deviation > 1e-8 and verdict.deviation < verdict.bound <= 1
        (exact,) = judge(wide_reference, {"4x1": run})
        assert exact.finding and exact.bound is None


def test_a_difference_outside_the_fingerprints_is_found(references, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    # As older versions wrote it.
    recorded = (references[False] / "fingerprints.jsonl").read_text()
    (run / "fingerprints.jsonl").write_text(recorded.replace('"stage"', '"rung"'))
    (run / "metrics.jsonl").write_bytes((references[False] / "metrics.jsonl").read_bytes())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[2]["grad_norm"] *= 1 + 1e-9
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (verdict,) = judge(references[False], {"run": run})
    assert verdict.deviation == pytest.approx(1e-9, rel=1e-3)
    assert verdict.finding.startswith("step 3, grad_norm is")


def test_rounding_bound():
    assert rounding_bound("float32", np.array([1, 20]))[1] == pytest.approx(816 * 2**-24)
    assert (
        rounding_bound("bfloat16", 1) > rounding_bound("float32", 1) > rounding_bound("float64", 1)
    )
    assert "torch" in sys.modules
