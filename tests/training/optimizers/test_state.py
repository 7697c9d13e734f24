"""The optimizer's state: all of it from the start, and moments that are stored in bfloat16."""

import shutil
from dataclasses import replace
from typing import get_args

import pytest
import torch

from models.weights import Weight
from tests.runs import checkpoint_tensors, curve, train
from tests.toy import deviation, train_toy
from training.config.checks import MAX_ROUNDED_BETA
from training.config.options import planner_options
from training.config.schema import Config, OptimizerSection
from training.optimizers import sharded as updates
from training.optimizers.sharded import ShardedOptimizer

BFLOAT16 = {"optimizer": "adamw", "lr": 0.01, "optimizer_state_dtype": "bfloat16"}
FLAGS = ["--optimizer-state-dtype", "bfloat16"]


class Small(torch.nn.Linear):
    """A model of a matrix and a vector."""

    config = None


@pytest.fixture(autouse=True)
def its_table(monkeypatch):
    weight = Weight("weight", (5, 9), "replicated")
    table = {"weight": weight, "bias": replace(weight, name="bias", kind="norm")}
    monkeypatch.setattr(updates, "all_weights", lambda config: table)


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return Small(9, 5, dtype=torch.float64)


def update(model: torch.nn.Module, optimizer: ShardedOptimizer, step: int, skip=0.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype) * (1 - skip)
        p.grad /= 1 - skip  # not a number where the step is to be skipped
    optimizer.step(0.01, torch.tensor(skip))


@pytest.mark.parametrize("name", get_args(OptimizerSection.model_fields["optimizer"].annotation))
def test_all_state_exists_from_the_start(name):
    """What only a step makes is not there to be loaded into, and the planner counts all of it."""
    model, section = small_model(), OptimizerSection(optimizer=name)
    optimizer = ShardedOptimizer(model, section)
    before = optimizer.named_state().keys()
    update(model, optimizer, step=0)
    optimizer.zero_grad()
    assert optimizer.named_state().keys() == before
    weights, moments = optimizer.held_bytes()
    config = Config(optimizer=section, step={"dtype": "float64"})
    assert moments / weights == 2 * planner_options(config).moment_bytes / 8


@pytest.mark.parametrize("chunk", [7, 2**24])
def test_the_update_is_adamw_with_rounded_moments(chunk, monkeypatch):
    monkeypatch.setattr(updates, "CHUNK_ELEMENTS", chunk)
    found, expected = small_model(), small_model()
    rounded = ShardedOptimizer(found, OptimizerSection(**BFLOAT16))
    exact = ShardedOptimizer(
        expected, OptimizerSection(**BFLOAT16 | {"optimizer_state_dtype": "float32"})
    )
    for step in range(5):
        update(found, rounded, step, skip=float(step == 2))
        update(expected, exact, step, skip=float(step == 2))
        for name, moment in exact.named_state().items():
            if not name.endswith("step"):
                moment.copy_(moment.bfloat16())
    for a, b in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b) and a.isfinite().all()
    wanted = exact.named_state()
    for name, moment in rounded.named_state().items():
        assert torch.equal(moment, wanted[name].to(moment.dtype))
        assert moment.dtype == (torch.float32 if name.endswith("step") else torch.bfloat16)
    assert rounded.named_state()["weight.step"] == 4


def decay(beta: float) -> torch.Tensor:
    """What is left of second moments of all mantissas after hundred steps without a gradient."""
    model = Small(128, 1, bias=False)
    section = OptimizerSection(beta2=beta, optimizer_state_dtype="bfloat16", lr=1e-9)
    optimizer = ShardedOptimizer(model, section)
    moment = optimizer.named_state()["weight.exp_avg_sq"]
    moment.copy_(1 + torch.arange(128) / 128)
    before = moment.float()
    for _ in range(100):
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step(1e-9, torch.tensor(0.0))
    return moment.float() / before


def test_why_a_large_beta_is_refused():
    """Rounding keeps a moment that should fade, and does so for none up to the largest allowed."""
    assert (decay(0.999) == 1).sum() > 100
    assert decay(MAX_ROUNDED_BETA).max() < 0.5  # exactly: 0.366
    assert decay(0.95).max() < 0.02


def test_a_layout_is_only_a_layout(ranks1, ranks4):
    """But for a moment whose rounding is a tie to 1e-16."""
    options = {"optimizer": BFLOAT16, "mask": "uneven"}
    (expected,) = ranks1.run(train_toy, **options)
    found = ranks4.run(train_toy, 2, sp=True, micro_batches=2, **options)[0]
    assert deviation(found, expected) < 1e-10


def test_a_run_goes_on_bit_for_bit(launched2, tmp_path):
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    train(launched2, straight, "--steps", 6, *FLAGS)
    train(launched2, parts, "--steps", 3, "--lr-decay-steps", 6, *FLAGS)
    shutil.copytree(parts, tmp_path / "other")
    train(launched2, parts, "--steps", 6, *FLAGS)
    assert curve(parts) == curve(straight)
    last = "checkpoints/step-00000006"
    found, expected = checkpoint_tensors(parts / last), checkpoint_tensors(straight / last)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    moments = [t for name, t in found.items() if name.endswith(("exp_avg", "exp_avg_sq"))]
    assert len(moments) == 42 and {m.dtype for m in moments} == {torch.bfloat16}
    # On another layout: to the rounding of float32.
    train(launched2, tmp_path / "other", "--steps", 6, "--tp", 2, *FLAGS)
    for row, other in zip(curve(tmp_path / "other"), curve(straight), strict=True):
        assert row == pytest.approx(other, rel=1e-4)
