"""Any layout with any options is only a layout: random draws against one process, in float64.

``pytest tests/test_property.py --draws 200 --draw-seed 7`` draws more of them, or others.
"""

import random

import pytest

from tests.toy import deviation, train_toy


def draw(seed: int) -> tuple[int, int, dict, dict]:
    """(processes, tp, what may not matter, what the reference shares) of one draw."""
    chance = random.Random(seed)
    processes = chance.choice([2, 4, 4, 8])
    tp = chance.choice([t for t in (1, 2, 4, 8) if processes % t == 0])
    cp = chance.choice([c for c in (1, 1, 2, 4) if processes // tp % c == 0])
    ranks = processes // tp // cp
    zero = chance.choice([3, 3, 2, 1, 0])
    options = {
        "cp": cp,
        "zero": zero,
        "rep": chance.choice([r for r in (1, 2, 4) if ranks % r == 0]) if zero else 1,
        "micro_batches": chance.choice([m for m in (1, 2, 4, 8) if 8 // ranks % m == 0]),
        "sp": tp > 1 and chance.random() < 0.5,
        "memory": {
            "activation_checkpoint": chance.choice(["none", "selective", "full"]),
            "loss_chunks": chance.choice([1, 1, 3]),
            "prefetch": chance.choice([None, 0, 2]),
        },
    }
    shared = {
        "tie_word_embeddings": chance.random() < 0.3,
        "num_key_value_heads": chance.choice([1, 2, 4, 8]),
        "vocab_size": chance.choice([64, 64, 65, 67]),
        "mask": chance.choice(["none", "uneven", "rank", "empty"]),
        "steps": 3,
    }
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


def test_a_draw(seed, reference, request):
    processes, tp, options, shared = draw(seed)
    found = request.getfixturevalue(f"ranks{processes}").run(train_toy, tp, **options, **shared)[0]
    gap = deviation(found, reference(shared))
    assert gap < 1e-10, f"{gap}: {processes} processes, tp {tp}, {options}, {shared}"
