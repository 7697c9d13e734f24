"""The step's invariants: what a bad step changes, what the host waits for, when ranks stop."""

import contextlib
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import training.loop
from parallel.layout import Layout
from tests.toy import (
    GLOBAL_BATCH,
    SEQ_LEN,
    local_batch,
    make_layout,
    make_model,
    make_ranks,
    one_step,
)
from training.checkpoint.saver import TrainState
from training.config.schema import Config, OptimizerSection
from training.data.batches import Sequences, TokenData
from training.loop import AgreedBatches, train
from training.loss import IGNORE_INDEX, cross_entropy_sum
from training.optimizers.sharded import ShardedOptimizer
from training.run.diagnosis import Diagnosis
from training.run.directory import RunDir
from training.run.fingerprints import Fingerprints
from training.run.heartbeat import Heartbeat
from training.run.metrics import Meter
from training.run.observers import Observers
from training.run.outcome import SIGNAL, TIME, NonFiniteError
from training.run.profiler import Profiler
from training.step import Engine


def snapshot(optimizer: ShardedOptimizer) -> list[bytes]:
    state = [*optimizer.parameters, *optimizer.named_state().values()]
    return [getattr(t, "_local_tensor", t).detach().numpy().tobytes() for t in state]


def step_with_nan(bad_rank: int | None, what: str, name: str) -> tuple[bool, str]:
    """Three steps, the second one spoilt on one dp rank; whether it changed anything, and what
    is said."""
    ranks = make_ranks(2)
    model = make_model(ranks, dtype="float32")
    optimizer = ShardedOptimizer(model, OptimizerSection(optimizer=name))
    engine, states = Engine(model, optimizer, make_layout(2), ranks), []

    def spoil(module, inputs, output):
        return output * float("nan")

    def spoil_grad(grad):
        return grad * float("inf")

    for step in (1, 2, 3):
        hook = contextlib.nullcontext()
        if step == 2 and ranks.dp_rank == bad_rank:
            norm = model.model.layers["1"].post_attention_layernorm
            if what == "loss":
                hook = norm.register_forward_hook(spoil)
            else:
                hook = norm.register_forward_hook(
                    lambda m, i, o: o.register_hook(spoil_grad) and None
                )
        with hook:
            one_step(engine, local_batch(step, ranks, 2, 64, "none"), step=step, lr=0.1)
        states.append(snapshot(optimizer))
    try:
        engine.fault.check(ranks)
        said = ""
    except NonFiniteError as error:
        said = str(error)
    assert states[2] != states[1], "the step after goes on"
    return states[1] == states[0], said


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("bad_rank", "what", "ranks"), [(1, "loss", "ranks 2, 3"), (0, "loss", "ranks 0, 1")]
)
def test_a_step_that_is_not_finite_changes_nothing(name, bad_rank, what, ranks, ranks4):
    for unchanged, said in ranks4.run(step_with_nan, bad_rank, what, name):
        assert unchanged
        assert said.startswith(f"step 2: the {what} is not finite on {ranks};")


def test_a_gradient_that_is_not_finite_changes_nothing(ranks4):
    for unchanged, said in ranks4.run(step_with_nan, 1, "gradient", "adamw"):
        assert unchanged and said.startswith("step 2: the gradient is not finite on rank")


def test_a_finite_step_changes_the_weights(ranks4):
    """The cases above would not notice an update that never happens."""
    for unchanged, said in ranks4.run(step_with_nan, None, "loss", "adamw"):
        assert not unchanged and not said


SYNCS = ("item", "tolist", "__bool__", "__int__", "__float__", "cpu", "numpy", "nonzero")


def count_syncs() -> dict:
    """How often one optimizer step reads a tensor's value on the host."""
    ranks = make_ranks(2)
    model = make_model(ranks, dtype="float32", sp=True)
    engine = Engine(model, ShardedOptimizer(model, OptimizerSection()), make_layout(2), ranks)
    found = Counter()

    def counting(name, method):
        def wrapper(self, *args, **kwargs):
            found[name] += 1
            return method(self, *args, **kwargs)

        return wrapper

    for step in (1, 2):
        batch = local_batch(step, ranks, 2, 64, "none")
        with contextlib.ExitStack() as patches:
            for name in SYNCS:
                method = getattr(torch.Tensor, name)
                patches.enter_context(mock.patch.object(torch.Tensor, name, counting(name, method)))
            one_step(engine, batch, step=step, lr=0.1)
            if step == 2:
                during = dict(found)
                engine.fault.step.item()
                assert found["item"] == 1 + during.get("item", 0), "the count works"
    return during


def test_a_step_never_waits_for_the_device(ranks4):
    assert ranks4.run(count_syncs) == [{}] * 4


class Recorder:
    """Stands where the reporter does."""

    def __init__(self):
        self.rows, self.evaluations = [], []
        self.log, self.log_eval = self.rows.append, self.evaluations.append
        self.sync = lambda: None


class Saver:
    """Stands where the checkpointer does."""

    def __init__(self, state: TrainState):
        self.steps = []
        self.save = self.finish = lambda: self.steps.append(state.step)


def run_loop(
    steps: int,
    mask_step: int | None = None,
    stop_on: tuple[int, int] | None = None,
    why: str = SIGNAL,
):
    """Train the toy model by the real loop. ``mask_step`` (0-based) has no target; ``stop_on`` is
    (rank, step): that rank is asked to stop, and ``why``, once it has done that step."""
    ranks = make_ranks(2)
    layout = Layout(dp=2, tp=2, micro_batch_size=2, micro_batches=2)
    config = Config(
        step={"steps": steps, "seq_len": SEQ_LEN, "global_batch_size": GLOBAL_BATCH},
        data={"eval_every": 2},
        run={"log_every": 2, "checkpoint_every": 0},
    )
    model = make_model(ranks, dtype="float32")
    config.model = model.config
    optimizer = ShardedOptimizer(model, config.optimizer)
    random = np.random.Generator(np.random.Philox(3))
    tokens = random.integers(0, 64, 3000).astype(np.uint16)
    train_data, eval_data = Sequences(tokens, SEQ_LEN), Sequences(tokens[:200], SEQ_LEN)
    counts = {"documents": 1, "skipped_records": 0, "train_tokens": 3000, "eval_tokens": 200}
    data = TokenData(train=train_data, eval=eval_data, content_key="", **counts)
    state, recorder = TrainState(), Recorder()
    diagnosis = Diagnosis(RunDir(Path("nowhere")), ranks)
    saver, heartbeat = Saver(state), Heartbeat(ranks, 60, None, diagnosis)
    observers = Observers(
        reporter=recorder if ranks.rank == 0 else None,
        meter=Meter(config, layout, ranks.device),
        heartbeat=heartbeat,
        fingerprints=Fingerprints(model, [model], optimizer, layout, ranks, Path("nowhere"), 0),
        profiler=Profiler(None, Path("nowhere"), ranks),
    )
    engine = Engine(model, optimizer, layout, ranks)
    real = training.loop.train_batch

    def masked(sequences, step, **kwargs):
        batch = real(sequences, step, **kwargs)
        if step == mask_step:
            batch = [(x, torch.full_like(y, IGNORE_INDEX)) for x, y in batch]
        return batch

    def stop_requested() -> str | None:
        return why if stop_on and ranks.rank == stop_on[0] and state.step >= stop_on[1] else None

    with mock.patch("training.loop.train_batch", masked):
        batches = AgreedBatches(data, 0, config, layout, ranks, stop_requested)
        outcome = train(engine, batches, data, state, config, observers, saver)
    heartbeat.stop()
    return outcome, state, recorder.rows, recorder.evaluations, saver.steps


def test_a_step_without_targets_is_skipped_and_counted(ranks4):
    found = ranks4.run(run_loop, 6, mask_step=3)
    assert {(f[0], f[1].step, f[1].skipped_steps) for f in found} == {(None, 6, 1)}
    records = found[0][2]
    assert [(r["step"], r["skipped_steps"]) for r in records] == [(1, 0), (2, 0), (4, 1), (6, 1)]
    assert records[2]["loss"] is None and records[2]["grad_norm"] is None
    assert all(np.isfinite(r["loss"]) for r in records if r["step"] != 4)
    assert [e["eval_tokens"] for e in found[0][3]] == [199] * 3
    assert [f[4] for f in found] == [[6]] * 4


@pytest.mark.parametrize("rank, why", [(0, SIGNAL), (3, SIGNAL), (3, TIME)])
def test_all_ranks_stop_at_the_same_step(rank, why, ranks4):
    found = ranks4.run(run_loop, 50, stop_on=(rank, 3), why=why)
    (step,) = {f[1].step for f in found}
    assert 3 <= step <= 5
    assert [f[0] for f in found] == [why] * 4
    assert [f[4] for f in found] == [[step]] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_loss_on_one_rank(dtype):
    """Value and gradient of torch's own cross-entropy; masked targets count nothing."""
    torch.manual_seed(0)
    logits = (torch.randn(2, 6, 11) * 4).to(dtype).requires_grad_()
    targets = torch.randint(0, 11, (2, 6))
    targets[0, 2:5] = IGNORE_INDEX
    wide = logits.detach().to(torch.float64).requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    expected.backward()
    found = cross_entropy_sum(logits, targets)
    found.backward()
    limit = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert found.item() == pytest.approx(expected.item(), rel=max(limit / 10, 1e-14) * 10)
    assert (logits.grad.double() - wide.grad).norm() / wide.grad.norm() < limit
    empty = cross_entropy_sum(logits, torch.full_like(targets, IGNORE_INDEX))
    assert empty.item() == 0 and dist.is_available()
