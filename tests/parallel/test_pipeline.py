"""Pipeline stages and schedules: how blocks are cut, what the bubble is, and that no schedule and
no change of the number of stages is anything but a layout."""

import itertools
import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.config import LlamaConfig
from parallel import pipeline
from parallel.stages import (
    SCHEDULES,
    balanced_blocks,
    bubble_fraction,
    make_stages,
    micro_batches_needed,
)
from planner.memory import in_flight, receiving
from tests.runs import curve, rows, train
from tests.toy import MODEL, deviation, train_toy
from training.config.command_line import load_recipe

FOUR = ["--num-hidden-layers", 4]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab_size", [16, 300, 2000])
@pytest.mark.parametrize("layers", [4, 7])
def test_the_slowest_stage_is_as_fast_as_possible(layers, vocab_size, stages):
    model = LlamaConfig(**(MODEL | {"num_hidden_layers": layers, "vocab_size": vocab_size}))
    seq_len, head = 16, vocab_size * 32
    block = (model.num_matmul_parameters - head) / layers + seq_len * 32

    def slowest(cut: list[range]) -> float:
        return max([len(b) * block for b in cut[:-1]] + [len(cut[-1]) * block + head])

    cuts = [
        [range(a, b) for a, b in itertools.pairwise((0, *ends, layers))]
        for ends in itertools.combinations(range(1, layers), stages - 1)
    ]
    found = balanced_blocks(model, stages, seq_len)
    assert found in cuts
    assert slowest(found) == min(map(slowest, cuts))


def test_stages_of_large_models():
    """The head of 405B weighs as much as two thirds of a block; 8B has fewer, lighter blocks."""
    model = load_recipe("llama3_405b").model
    counts = [len(blocks) for blocks in balanced_blocks(model, 8, 8192)]
    assert counts == [15, 16, 16, 16, 16, 16, 16, 15]
    model = load_recipe("llama3_8b").model
    counts = [len(blocks) for blocks in balanced_blocks(model, 4, 8192)]
    assert sum(counts) == 32 and counts[-1] < counts[1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_of_stages(schedule):
    model = LlamaConfig(**(MODEL | {"num_hidden_layers": 8}))
    found = [stage.pp_rank for stage in make_stages(model, schedule, 4, 16)]
    expected = {"gpipe": [0, 1, 2, 3], "1f1b": [0, 1, 2, 3], "interleaved": [0, 1, 2, 3] * 2}
    assert found == expected.get(schedule, [0, 1, 2, 3, 3, 2, 1, 0])


def table_of(schedule: str, pp: int, micro_batches: int) -> tuple[dict[int, list], int]:
    """What torch's schedule does on each rank, as (kind, stage), and the number of stages."""
    known = SCHEDULES[schedule]
    count = pp * known.stages_per_rank
    dist.init_process_group("fake", rank=0, world_size=pp, store=FakeStore())
    ids = [0, count - 1] if known.v_shaped else range(0, count, pp)
    stages = [PipelineStage(nn.Linear(1, 1), i, count, torch.device("cpu")) for i in ids]
    kind = get_schedule_class(known.torch_name)
    several = issubclass(kind, PipelineScheduleMulti)
    made = kind(stages if several else stages[0], micro_batches, loss_fn=lambda x, _: x)
    dist.destroy_process_group()

    def flat(action) -> list:
        parts = action.sub_actions or [action]
        return [(part.computation_type.value, part.stage_index) for part in parts]

    return {
        rank: [x for a in actions if a for x in flat(a) if x[0] in "FBIW"]
        for rank, actions in made.pipeline_order.items()
    }, count


def bubble_of(table: dict[int, list], count: int) -> float:
    """The idle part of a schedule, played with F, I and W of one unit and B of two.

    Each stage meets the micro-batches in order, so that the table need not number them.
    """
    cost = {"F": 1, "B": 2, "I": 1, "W": 1}
    clock, busy, done = dict.fromkeys(table, 0), dict.fromkeys(table, 0), {}
    seen = dict.fromkeys(itertools.product("FBW", range(count)), 0)
    queues = {rank: list(actions) for rank, actions in table.items()}
    while any(queues.values()):
        before = len(done)
        for rank, queue in queues.items():
            while queue:
                kind, stage = queue[0]
                key = ("B" if kind == "I" else kind), stage
                number, waits_for = seen[key], []
                if kind == "F" and stage:
                    waits_for = [("F", stage - 1, number)]
                elif kind in "BI":
                    waits_for = [("F", stage, number)]
                    waits_for += [("B", stage + 1, number)] if stage < count - 1 else []
                if any(x not in done for x in waits_for):
                    break
                start = max([clock[rank], *(done[x] for x in waits_for)])
                done[*key, number] = clock[rank] = start + cost[kind]
                busy[rank] += cost[kind]
                seen[key] += 1
                queue.pop(0)
        assert len(done) > before, "the table waits for itself"
    return 1 - sum(busy.values()) / len(table) / max(clock.values())


def largest_moments(actions: list) -> set[tuple[int, ...]]:
    """Micro-batches whose hidden states a rank keeps for each of its stages, in order, at all
    moments when it keeps most."""
    change = {"F": 1, "B": -1, "W": -1, "I": 0}
    kept, moments = dict.fromkeys(sorted({stage for _, stage in actions}), 0), set()
    for kind, stage in actions:
        kept[stage] += change[kind]
        moments.add(tuple(kept.values()))
    most = max(map(sum, moments))
    return {moment for moment in moments if sum(moment) == most}


def played(schedule: str) -> list[tuple]:
    """Sizes, bubble, and for each rank the largest moments, of torch's own tables."""
    found = []
    for pp, m in [(pp, m * pp) for pp in (2, 4, 8) for m in (1, 2, 3, 8)]:
        if not micro_batches_needed(schedule, pp, m):
            table, count = table_of(schedule, pp, m)
            moments = [largest_moments(table[rank]) for rank in range(pp)]
            found.append((pp, m, bubble_of(table, count), moments))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bubble_and_micro_batches_in_flight(schedule, launched1):
    """What stages.py, the planner and docs/parallelism.md say of a schedule is what it does."""
    found = launched1.run(played, schedule)[0]
    assert {pp for pp, *_ in found} == {2, 4, 8}
    for pp, m, bubble, moments in found:
        assert bubble == pytest.approx(bubble_fraction(schedule, pp, m), abs=1e-12)
        for rank, largest in enumerate(moments):
            assert in_flight(schedule, pp, rank, m) in largest, (pp, rank, m)
        documented = {"gpipe": m, "1f1b": pp, "interleaved": 3 * pp - 1, "zbv": 2 * pp}
        if m > pp:
            assert sum(in_flight(schedule, pp, 0, m)) == documented.get(schedule, 2 * pp + 1)


def most_received_into(schedule: str) -> tuple[int, int]:
    """Buffers that a rank receives into at once, and those that are left after a step."""
    made, most, remake = set(), [0], pipeline._remake

    def counted(received, device):
        remake(received, device)
        for info in received:
            made.discard(id(info)) if device == "meta" else made.add(id(info))
        most[0] = max(most[0], len(made))

    with mock.patch.object(pipeline, "_remake", counted):
        train_toy(1, pp=2, schedule=schedule, micro_batches=4, num_hidden_layers=4, zero=1)
    return most[0], len(made)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_buffers_go_once_they_are_computed_with(schedule, ranks4):
    """However many micro-batches there are."""
    found = ranks4.run(most_received_into, schedule)
    assert all(left == 0 for _, left in found)
    assert 1 <= max(most for most, _ in found) <= receiving(schedule, 2)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zbv", "dualpipev"])
def test_each_schedule_has_the_curve_of_1f1b(schedule, ranks4):
    options = {"pp": 2, "micro_batches": 4, "num_hidden_layers": 4, "zero": 1, "mask": "uneven"}
    expected = ranks4.run(train_toy, 1, **options)[0]
    found = ranks4.run(train_toy, 1, schedule=schedule, **options)[0]
    assert deviation(found, expected) < 1e-13


@pytest.mark.parametrize(
    "flags",
    [["--tp", 2], ["--cp", 2, "--pp-schedule", "zbv", "--zero", 1]],
    ids=["1f1b", "zbv"],
)
def test_evaluation_of_a_pipeline(flags, launched1, fresh, tmp_path):
    """Every held-out target once, before and after steps, with the loss of one process."""
    common = [*FOUR, "--steps", 4, "--eval-every", 2, "--dtype", "float64"]
    train(launched1, tmp_path / "one", *common)
    train(fresh(4), tmp_path / "pipeline", *common, "--pp", 2, *flags)
    found, expected = (rows(tmp_path / n, "eval.jsonl") for n in ("pipeline", "one"))
    assert [row["step"] for row in found] == [2, 4]
    for a, b in zip(found, expected, strict=True):
        assert a["eval_tokens"] == b["eval_tokens"] > 0
        assert a["eval_loss"] == pytest.approx(b["eval_loss"], rel=1e-12)


def test_a_run_through_all_layouts(launched1, fresh, tmp_path):
    """Two steps each as 2x2x2, 8x1, 1x8, dp4-cp2, and 2x2x2 again: the curve of one process."""
    common = [*FOUR, "--num-attention-heads", 8, "--dtype", "float64", "--lr-decay-steps", 10]
    train(launched1, tmp_path / "one", *common, "--steps", 10)
    three = ["--pp", 2, "--tp", 2]
    layouts = [three, [], ["--tp", 8], ["--cp", 2], [*three, "--pp-schedule", "interleaved"]]
    for i, layout in enumerate(layouts, start=1):
        train(fresh(8), tmp_path / "run", *common, *layout, "--steps", 2 * i)
    starts = json.loads((tmp_path / "run/run.json").read_text())["starts"]
    names = [start["layout"] for start in starts]
    assert names == ["pp2-dp2-tp2", "8x1", "1x8", "dp4-cp2-tp1", "pp2-dp2-tp2"]
    found, expected = curve(tmp_path / "run"), curve(tmp_path / "one")
    assert [row[0] for row in found] == list(range(1, 11))
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-11)
