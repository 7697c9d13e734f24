"""The planner's formulas are what the trainer does, to the byte: traced on one process."""

import math
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from common.errors import LayoutError
from models.config import LlamaConfig
from models.decoder import Llama
from parallel import parallelize
from parallel.launch import Launch
from parallel.layout import Layout, layout_flags, parse_layout
from planner.memory import Options, loss_bytes, memory
from recipes.plan import dry_run
from recipes.plan.measure import LiveBytes, local_bytes
from recipes.plan.trace import fake_rank
from tests.ranks import CONTEXT, Group
from training.config.command_line import RECIPES, parse_flags
from training.config.options import planner_options
from training.config.schema import Config
from training.loss import chunked_cross_entropy_sum, cross_entropy_sum
from training.setup import parameter_dtype
from training.start import check

# Eight query heads to a key/value head, and of those fewer than tp ranks in layouts of tp 4.
MODEL = """
    --hidden-size 64 --intermediate-size 128 --num-attention-heads 16 --num-key-value-heads 2
    --vocab-size 256 --seq-len 64 --micro-batch-size 1
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def one():
    """A process of its own: DTensor remembers meshes of groups that are gone."""
    group = Group(1, process_group=False)
    yield group
    group.close()


def configure(name: str, *flags: str) -> tuple[Config, Layout]:
    config = parse_flags([*layout_flags(name), *flags], console=False)
    config.model.vocab_size = config.model.vocab_size or 257
    return config, check(config, Launch(0, math.prod(parse_layout(name).values()), 0, 1))


def test_the_planner_is_torch_free():
    code = "import sys, recipes.plan.dry_run, recipes.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def traced_and_planned(name: str, flags: str) -> list[tuple[dict, dict]]:
    """The numbers of the first, a middle and the last coordinate of pp."""
    config, layout = configure(name, *MODEL, *flags.split())
    ranks = sorted({0, layout.pp // 2, layout.pp - 1})
    both = dry_run.extrapolate, dry_run.formula
    return [tuple(f(config, layout, rank) for f in both) for rank in ranks]


@pytest.fixture(scope="module")
def traced(request):
    """What a case gives. Those of all tests that are to run are traced ahead, two at a time."""
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params.get("case") for item in items if hasattr(item, "callspec")]
    with ProcessPoolExecutor(2, CONTEXT) as pool:
        ahead = {case: pool.submit(traced_and_planned, *case) for case in filter(None, cases)}
        yield lambda case: ahead[case].result()


BLOCKS = {
    f"{mode}-{tp}-{sp}-{kind}": (
        f"2x{tp}",
        f"--num-hidden-layers 2 --global-batch-size 2 --dtype {dtype} --sequence-parallel {sp} "
        f"--activation-checkpoint {mode}",
    )
    for mode in ("none", "full")
    for tp, sp in ((1, "off"), (2, "off"), (2, "on"), (4, "off"), (4, "on"))
    for kind, dtype in (("cpu", "float32"), ("cuda", "bfloat16"))
}


@pytest.mark.parametrize("case", BLOCKS.values(), ids=BLOCKS)
def test_what_blocks_keep(case, traced):
    ((found, expected),) = traced(case)
    assert found == expected


def flags_of(layers: int, batch: int, flags: str) -> str:
    return f"--num-hidden-layers {layers} --global-batch-size {batch} {flags}"


LAYOUTS = [
    (name, flags_of(3, 16, flags))
    for name, flags in [
        ("4x1", "--zero 3"),
        ("4x1", "--zero 2"),
        ("4x1", "--zero 1"),
        ("4x1", "--zero 0"),
        ("2x2", "--zero 1 --sequence-parallel on --prefetch 2 --optimizer-state-dtype bfloat16"),
        ("rep2-dp2-tp2", "--zero 3"),
        ("rep2-dp2-tp1", "--zero 1 --tie-word-embeddings --optimizer sgd"),
        ("dp2-cp2-tp2", "--zero 3 --activation-checkpoint full --sequence-parallel on"),
        ("dp1-cp4-tp1", "--zero 2 --loss-chunks 3 --dtype bfloat16"),
        ("2x4", "--vocab-size 257 --loss-chunks 5 --dtype bfloat16"),
        ("dp2-cp2-tp1", "--zero 1 --vocab-size 257 --dtype float64"),
        ("1x2", "--zero 1"),
    ]
]


@pytest.mark.parametrize("case", LAYOUTS, ids="-".join)
def test_what_layouts_hold_and_send(case, traced):
    ((found, expected),) = traced(case)
    assert found == expected


PIPELINES = [
    (name, flags_of(layers, batch, f"--pp-schedule {schedule} {flags}"))
    for name, schedule, layers, batch, flags in [
        ("pp3-dp2-tp2", "1f1b", 7, 16, "--zero 3 --sequence-parallel on"),
        ("pp2-dp2-tp1", "gpipe", 3, 16, "--zero 2 --activation-checkpoint full"),
        ("pp2-dp1-cp2-tp2", "1f1b", 3, 8, "--zero 1 --dtype bfloat16"),
        ("pp2-rep2-dp2-tp1", "interleaved", 4, 24, "--zero 1 --activation-checkpoint full"),
        ("pp2-dp2-tp2", "zbv", 4, 12, "--zero 1 --sequence-parallel on --dtype bfloat16"),
        ("pp2-dp2-tp1", "dualpipev", 4, 12, "--zero 0"),
        ("pp2-dp1-tp1", "interleaved", 4, 8, "--zero 1"),
    ]
]


@pytest.mark.parametrize("case", PIPELINES, ids="-".join)
def test_what_pipelines_hold_and_send(case, traced):
    for found, expected in traced(case):
        assert found == expected
        assert found["recv over pp: count"] == found["send over pp: count"] > 0


def parameters_of(recipe: str) -> list[tuple[int, int]]:
    """Bytes on the first rank of each coordinate of pp, counted and planned, of the layout of a
    recipe on 8 GPUs, or with a pipeline on 512."""
    config = parse_flags(["--recipe", recipe], console=False)
    config.model.vocab_size = config.model.vocab_size or 257
    layout = check(config, Launch(0, 8 if config.layout.pp == 1 else 512, 0, 1))
    options, found = planner_options(config), []
    for pp_rank in range(layout.pp):
        stages = layout.rank_stages(config.model, config.step.seq_len, pp_rank)
        with torch.device("meta"):
            model = Llama(config.model).to(parameter_dtype(config))
        with fake_rank(layout, pp_rank * layout.world_size // layout.pp) as ranks:
            parallelize(model, ranks.mesh, options, zero=layout.zero, stages=stages)
        counted = sum(map(local_bytes, model.parameters()))
        planned = memory(config.model, layout, options, stages)
        found.append((counted, planned.parameters))
    return found


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.toml")))
def test_parameters_of_every_stage(recipe, one):
    for counted, planned in one.run(parameters_of, recipe)[0]:
        assert counted == planned > 0


def trace_of_405b() -> tuple[int, dict, dict]:
    flags = "--recipe", "llama3_405b", "--zero", "1", "--pp-schedule", "1f1b"
    config, layout = configure("pp8-dp64-tp8", *flags)
    config.model.num_hidden_layers = 8
    layout = replace(layout, micro_batches=8)
    both = dry_run.extrapolate(config, layout, 4), dry_run.formula(config, layout, 4)
    return layout.world_size, *both


def test_a_rank_of_4096(one):
    """A block of 405B in the middle of the pipeline."""
    world_size, found, expected = one.run(trace_of_405b)[0]
    assert world_size == 4096
    assert found == expected and found["gathered parameters: bytes"] > 7e8


def peak_of_loss(vocab_size: int, tp: int, chunks: int, dtype: str) -> tuple[int, int]:
    """Largest bytes of the loss and its backward, beside its inputs: traced and planned."""
    layout = Layout(dp=1, tp=tp, micro_batch_size=2, micro_batches=1)
    config = LlamaConfig(hidden_size=32, vocab_size=vocab_size)
    kind = getattr(torch, dtype)
    with fake_rank(layout, 0) as ranks, FakeTensorMode():
        hidden = torch.empty((2, 64, 32), dtype=kind, requires_grad=True)
        weight = torch.empty((vocab_size // tp, 32), dtype=kind, requires_grad=True)
        targets, group = torch.zeros((2, 64), dtype=torch.int64), {"tp_group": ranks.tp_group}
        with LiveBytes() as live:
            if chunks == 1:
                loss = cross_entropy_sum(F.linear(hidden, weight), targets, **group)
            else:
                loss = chunked_cross_entropy_sum(hidden, weight, targets, chunks, **group)
            loss.backward()
    options = Options(seq_len=64, loss_chunks=chunks, dtype=dtype)
    return live.peak, loss_bytes(config, layout, options)[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tp", "chunks"), [(1, 1), (2, 1), (1, 4), (2, 5)])
def test_the_loss_per_logit(tp, chunks, dtype, one):
    """Of two vocabularies, so that what does not grow with them cancels."""
    (found, expected), (more, planned) = (
        one.run(peak_of_loss, vocab, tp, chunks, dtype)[0] for vocab in (4096, 8192)
    )
    assert more - found == planned - expected > 0


def dry_run_of_a_wrong_formula() -> tuple[int, int]:
    config, layout = configure("2x2", *MODEL, "--num-hidden-layers", "2", "--compile")
    with pytest.raises(LayoutError, match=r"--compile cannot be traced .* use --no-compile$"):
        dry_run.dry_run(config, layout)
    config.memory.compile = False
    right = dry_run.dry_run(config, layout)
    with mock.patch("planner.memory.block_bytes", lambda *_: 1):
        return right, dry_run.dry_run(config, layout)


def test_a_wrong_formula_is_told(one):
    assert one.run(dry_run_of_a_wrong_formula) == [(0, 1)]
