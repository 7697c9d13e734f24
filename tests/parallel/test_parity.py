"""A layout is only a layout: loss, gradient norm, every gradient and the weights after 5 SGD steps
equal those of one process, whatever the layout and the micro-batches."""

import numpy as np
import pytest

from tests.toy import deviation, train_toy

FLOAT64, FLOAT32 = 1e-10, 1e-5

# (processes, tp, what else differs from the reference, what the reference shares)
CASES = [
    (8, 8, {}, {}),
    (8, 4, {"sp": True}, {}),
    (8, 2, {"micro_batches": 2, "zero": 2}, {}),
    (8, 1, {}, {}),
    (8, 2, {"sp": True}, {"vocab_size": 67}),
    (8, 2, {"zero": 2}, {"vocab_size": 65, "tie_word_embeddings": True}),
    (8, 8, {"sp": True}, {"tie_word_embeddings": True, "vocab_size": 67}),
    (8, 4, {"micro_batches": 4}, {"mask": "uneven", "vocab_size": 65}),
    (4, 2, {}, {}),
    (4, 2, {"sp": True, "micro_batches": 4}, {}),
    (4, 4, {"sp": True}, {"num_key_value_heads": 2, "vocab_size": 66}),
    (4, 4, {"zero": 2}, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    (4, 1, {"micro_batches": 2}, {"mask": "uneven"}),
    (4, 2, {"sp": True}, {"mask": "uneven", "tie_word_embeddings": True}),
    (4, 2, {"zero": 2, "micro_batches": 2}, {"mask": "rank"}),
    (4, 2, {"sp": True, "micro_batches": 2}, {"mask": "empty"}),
    (4, 1, {}, {"vocab_size": 65, "tie_word_embeddings": True}),
    (4, 2, {"micro_batches": 2}, {"optimizer": {"optimizer": "adamw", "lr": 1e-2}}),
    (4, 2, {"sp": True}, {"head_dim": 6, "mask": "uneven"}),
    (8, 2, {"rep": 2, "sp": True, "micro_batches": 2}, {"mask": "uneven"}),
    (8, 2, {"cp": 2, "sp": True, "micro_batches": 2}, {"mask": "uneven"}),
    (8, 1, {"cp": 8}, {"vocab_size": 65, "num_key_value_heads": 1}),
    (8, 2, {"cp": 2, "rep": 2}, {"mask": "rank", "vocab_size": 67}),
    (4, 1, {"cp": 4, "zero": 0}, {"tie_word_embeddings": True}),
    (8, 1, {"rep": 4, "zero": 2, "micro_batches": 1}, {"vocab_size": 65}),
    (8, 2, {"rep": 2, "zero": 1, "micro_batches": 2}, {"vocab_size": 67}),
    (4, 1, {"rep": 4, "micro_batches": 2}, {"tie_word_embeddings": True}),
    (8, 4, {"zero": 1, "sp": True, "micro_batches": 4}, {"num_key_value_heads": 2}),
    (4, 2, {"zero": 1, "micro_batches": 2}, {"tie_word_embeddings": True, "mask": "uneven"}),
    (4, 1, {"zero": 1, "micro_batches": 2}, {"vocab_size": 67}),
    (8, 2, {"zero": 0, "sp": True, "micro_batches": 2}, {"mask": "uneven", "vocab_size": 67}),
    (4, 1, {"zero": 0, "micro_batches": 2}, {"tie_word_embeddings": True}),
    (4, 4, {"zero": 0, "sp": True, "micro_batches": 2}, {"num_key_value_heads": 1}),
    (1, 1, {"micro_batches": 8, "zero": 2}, {"mask": "uneven"}),
]


@pytest.fixture(scope="module")
def reference(ranks1):
    """Runs of one process with one micro-batch, each made once."""
    runs = {}

    def get(**shared):
        key = repr(shared)
        if key not in runs:
            runs[key] = ranks1.run(train_toy, **shared)[0]
        return runs[key]

    return get


def _name(case) -> str:
    processes, tp, options, shared = case
    words = [f"{k}={v}" for k, v in (options | shared).items()]
    return "-".join([f"{processes // tp}x{tp}", *words])


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_float64(case, reference, request):
    processes, tp, options, shared = case
    group = request.getfixturevalue(f"ranks{processes}")
    found = group.run(train_toy, tp, **options, **shared)[0]
    assert deviation(found, reference(**shared)) < FLOAT64


@pytest.mark.parametrize(
    ("processes", "tp", "sp"),
    [
        (8, 8, True),
        (8, 4, True),
        (8, 2, False),
        (8, 1, False),
        (4, 4, True),
        (4, 2, False),
        (4, 1, False),
    ],
)
def test_float32(processes, tp, sp, reference, request):
    group = request.getfixturevalue(f"ranks{processes}")
    found = group.run(train_toy, tp, sp=sp, dtype="float32")[0]
    expected = reference(dtype="float32")
    for key in ("loss", "grad_norm"):
        assert found[key] == pytest.approx(expected[key], rel=FLOAT32)
    # The weights of both dtypes are the same numbers at step 0.
    assert found["loss"][0] == pytest.approx(reference()["loss"][0], rel=1e-6)


def test_bfloat16(reference, ranks4):
    """Computed in bfloat16, stored and updated in float32: roughly the curve of float32."""
    found = ranks4.run(train_toy, 2, sp=True, dtype="bfloat16")[0]
    expected = reference(dtype="float32")
    assert found["loss"] == pytest.approx(expected["loss"], rel=5e-3)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-2)
    assert found["loss"] != expected["loss"]
    assert {w.dtype for w in found["weights"].values()} == {np.dtype("float32")}
    small = ranks4.run(train_toy, 2, dtype="bfloat16", optimizer={"lr": 1e-4, "weight_decay": 0})[0]
    start = ranks4.run(train_toy, 2, dtype="bfloat16", steps=0)[0]
    # Updates far below the resolution of bfloat16 are kept.
    for name, weight in small["weights"].items():
        assert 0 < np.linalg.norm(weight - start["weights"][name]) < 1e-3


def test_masks_matter(reference):
    """The cases above would not notice a mask that is ignored."""
    losses = [reference(mask=mask)["loss"][0] for mask in ("none", "uneven", "rank")]
    assert len({round(loss, 6) for loss in losses}) == 3
    assert len(reference(mask="empty")["loss"]) == 4
