"""Whole runs: files, restarts on the same and on other layouts, and what a person sees."""

import gzip
import json
import math
import os
import re
import socket
import subprocess
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from models.config import LlamaConfig
from parallel.layout import Dims, make_layout
from planner.print_plan import ParameterRow, format_plan
from tests.ranks import RankError, free_port
from tests.runs import SMALL, checkpoint_tensors, curve, forked, rows, run_main, train
from training.config.schema import DataSection
from training.data.tokenizer import load_tokenizer
from training.data.tokens import prepare_tokens

REPO = Path(__file__).parents[2]
EVALUATE = ["--eval-every", 5, "--eval-batches", 0]
FIELDS = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "skipped_steps",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "step_s",
    "data_s",
    "update_s",
    "mfu",
    "tflops_per_device",
    "peak_memory_bytes",
    "time",
}


@pytest.fixture(scope="module")
def straight(launched4, tmp_path_factory):
    """Ten steps without a stop, at 2x2 in float32."""
    run_dir = tmp_path_factory.mktemp("straight")
    text = train(launched4, run_dir, "--tp", 2, "--steps", 10, *EVALUATE)
    return run_dir, text


def test_what_a_run_prints_and_leaves(straight):
    run_dir, text = straight
    lines = text.splitlines()
    assert any("layout 2x2" in line for line in lines)
    assert any("35,040 parameters" in line for line in lines)
    assert sum(line.startswith("step ") and "eval" not in line for line in lines) == 10
    assert lines[-1] == f"run directory: {run_dir}"
    assert lines[-2].startswith("start 1 of this run took 0m")
    assert lines[-2].endswith("newest checkpoint: step-00000010")
    assert "finished at step 10" in lines[-3]
    plan = [line for line in lines if line.startswith("plan: ")]
    assert len(plan) == 2 and " on the fullest ranks (" in plan[0] and "no step time" in plan[1]
    table = {row[0]: row[1:] for row in (re.split("  +", line) for line in lines[-11:-3])}
    for what in ("parameters of rank 0", "optimizer state of rank 0"):
        planned, measured = table[what]
        assert planned == measured and planned.endswith(" MiB")
    assert table["whole step"][0] == "-" and table["whole step"][1].endswith(" s")
    assert not any(ord(c) < 32 and c != "\n" for c in text)

    assert [r["step"] for r in rows(run_dir)] == list(range(1, 11))
    for row in rows(run_dir):
        assert row.keys() == FIELDS
        assert row["tokens"] == row["step"] * 8 * 32
        assert row["mfu"] is None and row["skipped_steps"] == 0
        assert row["peak_memory_bytes"] > 0 and 0 <= row["data_s"] <= row["step_s"]
        assert 0 < row["update_s"] < row["step_s"]
        assert row["tokens_per_s"] == pytest.approx(256 / row["step_s"])
        assert row["tokens_per_s_per_device"] == pytest.approx(row["tokens_per_s"] / 4)
    assert [r["step"] for r in rows(run_dir, "eval.jsonl")] == [5, 10]
    assert json.loads((run_dir / "status.json").read_text())["state"] == "finished"
    (start,) = json.loads((run_dir / "run.json").read_text())["starts"]
    assert start["layout"] == "2x2" and start["world_size"] == 4
    assert start["hosts"] == {socket.gethostname(): "0-3"}
    assert sorted(p.name for p in (run_dir / "logs").iterdir()) == [
        f"rank-0000{rank}.log" for rank in range(4)
    ]
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step-00000010"]


def test_a_finished_run_says_so(straight, launched4):
    run_dir, _ = straight
    before = curve(run_dir)
    text = train(launched4, run_dir, "--tp", 2, "--steps", 10, *EVALUATE)
    assert "is finished: 10 of 10 steps" in text and "--steps" in text
    assert curve(run_dir) == before


@pytest.fixture(scope="module")
def stopped_at_five(launched4, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("stopped")
    train(launched4, run_dir, "--tp", 2, "--steps", 5, "--lr-decay-steps", 10)
    return run_dir


def test_five_and_five_are_ten_bit_for_bit(straight, stopped_at_five, launched4, tmp_path):
    run_dir = tmp_path / "run"
    subprocess.run(["cp", "-r", stopped_at_five, run_dir], check=True)
    train(launched4, run_dir, "--tp", 2, "--steps", 10)
    assert curve(run_dir) == curve(straight[0])
    found, expected = (
        checkpoint_tensors(d / "checkpoints/step-00000010") for d in (run_dir, straight[0])
    )
    assert found.keys() == expected.keys() and len(found) == 21 * 4
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.fixture(scope="module")
def float64_runs(launched1, launched4, tmp_path_factory):
    """Ten steps on one process, and five at 2x2 to be continued; both in float64."""
    base = tmp_path_factory.mktemp("float64")
    train(launched1, base / "one", "--steps", 10, "--dtype", "float64")
    flags = ["--tp", 2, "--steps", 5, "--lr-decay-steps", 10, "--dtype", "float64"]
    train(launched4, base / "half", *flags, "--sequence-parallel", "on", "--micro-batch-size", 2)
    return base


@pytest.mark.parametrize("layout", ["4x1", "1x4", "1x1", "2x1", "4x2"])
def test_resume_on_another_layout(layout, float64_runs, request, tmp_path):
    dp, tp = map(int, layout.split("x"))
    group = request.getfixturevalue(f"launched{dp * tp}")
    run_dir = tmp_path / "run"
    subprocess.run(["cp", "-r", float64_runs / "half", run_dir], check=True)
    flags = ["--tp", tp, "--dtype", "float64"]
    train(group, run_dir, *flags, "--steps", 10)
    expected = curve(float64_runs / "one")
    found = curve(run_dir)
    assert [row[0] for row in found] == list(range(1, 11))
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-10)
    # Ten steps on one process, and five at 2x2 and five here, end in the same weights and moments.
    last = checkpoint_tensors(run_dir / "checkpoints/step-00000010")
    one = checkpoint_tensors(float64_runs / "one/checkpoints/step-00000010")
    assert last.keys() == one.keys()
    for name in last:
        gap = (last[name] - one[name]).double().norm() / one[name].double().norm()
        assert gap < 1e-10, name


def test_more_steps_keep_the_schedule(stopped_at_five, launched2, tmp_path):
    """The decay was fixed by the first start; past its end the rate stays at the minimum."""
    run_dir = tmp_path / "run"
    subprocess.run(["cp", "-r", stopped_at_five, run_dir], check=True)
    train(launched2, run_dir, "--tp", 2, "--steps", 12)
    rates = [row["lr"] for row in rows(run_dir)]
    assert rates[1] == 0.01 and rates[9:] == [pytest.approx(0.001)] * 3


def test_evaluation_is_the_same_on_every_layout(straight, launched1, launched2, tmp_path):
    """Every held-out token once, whatever the ranks and the batch size."""
    expected = rows(straight[0], "eval.jsonl")
    section = DataSection(dataset="synthetic")
    folder = prepare_tokens(section, load_tokenizer("bytes"), log=lambda line: None)
    meta = json.loads((folder / "meta.json").read_text())
    assert expected[0]["eval_tokens"] == meta["eval_tokens"] - 1
    for group, flags in ((launched1, ["--micro-batch-size", 1]), (launched2, ["--zero", 2])):
        run_dir = tmp_path / f"run{group.world_size}"
        train(group, run_dir, "--steps", 10, *EVALUATE, *flags)
        for row, other in zip(rows(run_dir, "eval.jsonl"), expected, strict=True):
            assert row["eval_tokens"] == other["eval_tokens"]
            assert row["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)


@pytest.fixture(scope="module")
def learned(launched2, tmp_path_factory):
    """Fifty steps of the default recipe."""
    run_dir = tmp_path_factory.mktemp("learned")
    argv = ["--recipe", "debug", "--steps", "50", "--eval-every", "0", "--wandb", "disabled"]
    launched2.run(run_main, [*argv, "--run-dir", str(run_dir), "--tp", "2"], free_port())
    return run_dir


def test_the_default_recipe_learns(learned):
    """Below the unigram entropy of its text, from ln(V) at the start."""
    first, last = rows(learned)[0], rows(learned)[-1]
    assert first["loss"] == pytest.approx(math.log(257), rel=0.05)
    data = next(
        f
        for f in Path(os.environ["PARALLEL_RECIPES_CACHE"]).glob("*/train.bin")
        if f.stat().st_size > 10**7
    )
    counts = np.bincount(np.fromfile(data, "<u2"))
    shares = counts[counts > 0] / counts.sum()
    assert last["step"] == 50 and last["loss"] < -(shares * np.log(shares)).sum()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    """It names the step and the rank, exits 1, and leaves the last checkpoint as it was."""
    argv = [*SMALL, "--run-dir", tmp_path, "--steps", 20, "--optimizer", "sgd", "--grad-clip", 0]
    argv += ["--lr", "1e30", "--warmup-steps", 0, "--checkpoint-every", 1, "--log-every", 5]
    code, _, err = forked(*argv)
    assert code == 1
    assert "Traceback" not in err
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "failed" and status["rank"] == 0
    assert re.search(rf"step {status['step']}: the (loss|gradient) is not finite on rank 0", err)
    saved = sorted((tmp_path / "checkpoints").iterdir())[-1]
    assert int(saved.name[-8:]) == status["step"] - 1
    assert all(tensor.isfinite().all() for tensor in checkpoint_tensors(saved).values())


def with_other_settings(argv: list[str], port: int):
    """Rank 1 is started with another learning rate, as from another node's recipe."""
    other = ["--lr", "0.02"] if os.environ["RANK"] == "1" else []
    # It gives rank 0 ten seconds to speak first.
    with mock.patch("training.start.time"):
        return run_main([*argv, *other], port)


def test_ranks_with_other_settings_are_refused(fresh, tmp_path):
    group = fresh(2)
    argv = [*SMALL, "--run-dir", str(tmp_path), "--steps", "4", "--tp", "2"]
    with pytest.raises(RankError, match="rank 1: died"):
        group.run(with_other_settings, argv, free_port())
    assert not (tmp_path / "metrics.jsonl").exists()


def test_print_plan():
    code, out, err = forked("--print-plan", "--tp", 4, "--world-size", 8)
    assert code == 0, err
    assert "layout 2x4, rank 0 of 8" in out
    (line,) = [x for x in out.splitlines() if "self_attn.o_proj" in x]
    assert line.split() == [
        "model.layers.0-3.self_attn.o_proj.weight",
        "(256,",
        "256)",
        "S(0)",
        "S(1)",
        "(128,",
        "64)",
        "32,768",
    ]
    assert len([x for x in out.splitlines() if x.startswith("model.")]) == 9 + 2
    assert re.match(r"plan: [\d.]+ MiB on the fullest ranks \(", out.splitlines()[-1])


def test_a_profile_of_chosen_steps(launched2, tmp_path):
    """The last of them is the last of the run."""
    train(launched2, tmp_path, "--tp", 2, "--steps", 3, "--profile", "2-3")
    for rank in range(2):
        with gzip.open(tmp_path / f"profile/trace-rank-0000{rank}.json.gz", "rt") as f:
            names = [event["name"] for event in json.load(f)["traceEvents"]]
        for name in ("forward", "backward", "gradient norm", "update"):
            assert names.count(name) == 2, "of two steps"
        assert "[memory]" in names
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


def test_equal_blocks_are_shown_once():
    """Not those that differ, or that are not neighbours, as in a pipeline of a V."""
    sizes = {0: 8, 1: 8, 2: 4, 3: 8, 9: 8, 10: 8}
    rows = [ParameterRow("model.norm.weight", (1,), "R", (1,), 4)]
    rows += [ParameterRow(f"model.layers.{i}.w", (2,), "R", (2,), b) for i, b in sizes.items()]
    model, layout = LlamaConfig(vocab_size=64), make_layout(1, Dims(), global_batch_size=1)
    text = format_plan(rows, {}, model, layout, seq_len=8)
    names = [
        line.split()[0].removeprefix("model.") for line in text.splitlines() if "model." in line
    ]
    assert names == ["norm.weight", *(f"layers.{i}.w" for i in ("0-1", "2", "3", "9-10"))]
    assert "total 48 bytes" in text
