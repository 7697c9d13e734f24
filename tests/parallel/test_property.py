"""Any layout with any options is only a layout: random draws against one process, in float64.

``pytest tests/parallel/test_property.py --draws 200 --draw-seed 7`` draws more of them, or others.
"""

import random

import pytest

from models.config import LlamaConfig
from parallel.stages import SCHEDULES, make_stages, micro_batches_needed
from tests.toy import MODEL, SEQ_LEN, deviation, train_toy


def draw(seed: int) -> tuple[int, int, dict, dict]:
    """(processes, tp, what may not matter, what the reference shares) of one draw."""
    chance = random.Random(seed)
    processes = chance.choice([2, 4, 4, 8])
    tp = chance.choice([t for t in (1, 2, 4, 8) if processes % t == 0])
    pp = chance.choice([p for p in (1, 2, 2, 4) if processes // tp % p == 0])
    cp = chance.choice([c for c in (1, 1, 2, 4) if processes // tp // pp % c == 0])
    ranks = processes // tp // cp // pp
    schedule, micro_batches = chance.choice(
        [
            (name, m)
            for name in (SCHEDULES if pp > 1 else ["1f1b"])
            for m in (1, 2, 4, 8)
            if 8 // ranks % m == 0 and not (pp > 1 and micro_batches_needed(name, pp, m))
        ]
    )
    splits = SCHEDULES[schedule].splits_backward
    zero = chance.choice([1, 0] if splits else [3, 3, 2, 1, 0])
    options = {
        "pp": pp,
        "schedule": schedule,
        "cp": cp,
        "zero": zero,
        "rep": chance.choice([r for r in (1, 2, 4) if ranks % r == 0]) if zero else 1,
        "micro_batches": micro_batches,
        "sp": tp > 1 and chance.random() < 0.5,
        "memory": {
            "activation_checkpoint": chance.choice(
                ["none"] if splits else ["none", "every-2", "full"]
            ),
            "loss_chunks": chance.choice([1, 1, 3]),
            "prefetch": chance.choice([None, 0, 2]),
        },
    }
    shared = {
        "tie_word_embeddings": pp == 1 and chance.random() < 0.3,
        "num_hidden_layers": max(3, pp * SCHEDULES[schedule].stages_per_rank) if pp > 1 else 2,
        "num_key_value_heads": chance.choice([1, 2, 4, 8]),
        "vocab_size": chance.choice([64, 64, 65, 67]),
        "mask": chance.choice(["none", "uneven", "rank", "empty"]),
        "steps": 3,
    }
    options["memory"]["compile"] = processes < 8 and not splits and chance.random() < 0.1
    return processes, tp, options, shared


def pytest_generate_tests(metafunc) -> None:
    first = metafunc.config.getoption("--draw-seed")
    metafunc.parametrize("seed", range(first, first + metafunc.config.getoption("--draws")))


@pytest.fixture(scope="module")
def reference(ranks1):
    """Runs of one process, each made once."""
    runs = {}

    def get(shared: dict):
        key = repr(shared)
        if key not in runs:
            runs[key] = ranks1.run(train_toy, **shared)[0]
        return runs[key]

    return get


def part(rows: int, parts: int, index: int) -> int:
    """Rows of one of several parts: ceil(rows / parts) each, the last ones what remains."""
    size = -(-rows // parts)
    return max(0, min(rows - index * size, size))


def local_elements(rank: int, processes: int, tp: int, options: dict, shared: dict) -> dict:
    """How many elements of each parameter a rank is to hold, by its place in the mesh."""
    model = LlamaConfig(**(MODEL | {k: v for k, v in shared.items() if k not in ("mask", "steps")}))
    pp, cp, whole = options["pp"], options["cp"], options["zero"] == 0
    dp = processes // tp // cp // pp // options["rep"]
    pp_rank = rank // (processes // pp)
    shards = cp if whole else dp * cp
    shard, at_tp = rank // tp % shards, rank % tp
    # The layout under test says which blocks a pp rank has; the rest is this formula.
    stages = make_stages(model, options["schedule"], pp, SEQ_LEN) if pp > 1 else []
    stages = [stage for stage in stages if stage.pp_rank == pp_rank]
    found = {}
    for name, (rows, *columns) in model.parameter_shapes.items():
        width = columns[0] if columns else 1
        if stages and ".layers." in name:
            if not any(int(name.split(".")[2]) in stage.blocks for stage in stages):
                continue
        elif stages and not any(stage.first if "embed" in name else stage.last for stage in stages):
            continue
        if "embed" in name or "lm_head" in name:
            uneven, rows = rows % tp, part(rows, tp, at_tp)
            if uneven:
                found[name] = rows * width // shards
                continue
        elif "o_proj" in name or "down_proj" in name:
            width //= tp
        elif ("k_proj" in name or "v_proj" in name) and model.kv_heads % tp:
            pass  # every rank has all heads
        elif "norm" not in name:
            rows //= tp
        found[name] = part(rows, shards, shard) * width
    return found


def test_a_draw(seed, reference, request):
    processes, tp, options, shared = draw(seed)
    found = request.getfixturevalue(f"ranks{processes}").run(train_toy, tp, **options, **shared)[0]
    gap = deviation(found, reference(shared))
    what = f"{processes} processes, tp {tp}, {options}, {shared}"
    assert gap < 1e-10, f"{gap}: {what}"
    for rank, held in enumerate(found["elements"]):
        assert held == local_elements(rank, processes, tp, options, shared), f"rank {rank}: {what}"
