"""recipes.compare_layouts: what it runs, refuses, continues, computes, draws and prints."""

import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from parallel.layout import layout_flags
from recipes.compare_layouts import command as compare_layouts
from recipes.compare_layouts import differences
from recipes.compare_layouts.command import main
from recipes.compare_layouts.judge import Lossy, Verdict, rounding_bound
from recipes.compare_layouts.plots import draw
from recipes.compare_layouts.report import print_table, table_rows
from recipes.compare_layouts.runs import PlannedRun, explain_failure, last_row
from tests.runs import SMALL
from training.config.command_line import parse_flags
from training.config.options import to_toml

REPO = Path(__file__).parents[2]
MODEL = [flag for flag in SMALL if flag not in ("--wandb", "disabled")]
STUDY = [flag for flag in MODEL if flag not in ("--global-batch-size", "8")]
LOSS = {"1x1": [4.0, 2.0, 1.0], "2x1": [4.0, 2.5, 0.9], "1x2": [4.0, 2.0, 1.0]}
NORM = {"1x1": [2.0, 0.0, 1.0], "2x1": [2.2, 0.0, 0.5], "1x2": [2.0, 0.0, None]}


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No launcher and no wandb account decides a test; runs/ is in tmp_path."""
    for name in [n for n in os.environ if n.startswith(("WANDB_", "SLURM_", "RANK", "WORLD_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.chdir(tmp_path)


def write_run(path: Path, layout: str, *flags: str, state="finished", loss=None, norm=None) -> Path:
    """A run directory as train_llm.py leaves it, made by hand."""
    path.mkdir(parents=True)
    loss, norm = loss or LOSS[layout], norm or NORM[layout]
    config = parse_flags([*SMALL, "--vocab-size", "257", "--steps", str(len(loss)), *flags])
    (path / "config.toml").write_text(to_toml(config))
    (path / "status.json").write_text(json.dumps({"state": state, "step": len(loss)}))
    start = {
        "layout": layout,
        "world_size": math.prod(map(int, layout.split("x"))),
        "device": "cpu",
        "python": "3.11.0",
        "versions": {"torch": "2.13.0"},
        "git_commit": "abc",
        "command": ["train_llm.py", "--tp", layout[-1]],
    }
    (path / "run.json").write_text(json.dumps({"starts": [{"layout": "9x9"}, start]}))
    tokens = config.step.global_batch_size * config.step.seq_len
    rows = [
        {
            "step": i + 1,
            "loss": loss[i],
            "grad_norm": norm[i],
            "tokens": (i + 1) * tokens,
            "tokens_per_s": [10.0, 700.0, 800.0][i],
            "peak_memory_bytes": [5, 7, 6][i] * 2**20,
        }
        for i in range(len(loss))
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def three(tmp_path):
    """A comparison directory with three finished runs in it."""
    for layout in LOSS:
        write_run(tmp_path / "out" / layout, layout)
    return tmp_path / "out"


def comparison_of(out: Path) -> dict:
    return json.loads((out / "comparison.json").read_text())


def test_numbers_of_a_comparison(three):
    assert main(["--collect", "--out", str(three)]) == 0
    comparison = comparison_of(three)
    assert (comparison["reference"], comparison["dtype"]) == ("1x1", "float32")
    assert comparison["global_batches_differ"] is False
    assert comparison["differing_flags"] == {}
    assert comparison["rounding_bound"]["step"] == [1, 2, 3]
    bound = rounding_bound("float32", np.array([1, 2, 3])).tolist()
    assert comparison["rounding_bound"]["loss"] == bound
    base, tensor, data = comparison["layouts"]
    assert [entry["label"] for entry in comparison["layouts"]] == ["1x1", "1x2", "2x1"]

    assert data["curve"]["loss"] == [4.0, 2.5, 0.9]
    assert data["curve"]["tokens"] == [256, 512, 768]
    assert data["deviation"]["loss"]["value"] == pytest.approx([0, 0.25, 0.1], abs=1e-15)
    assert data["deviation"]["grad_norm"]["value"] == pytest.approx([0.1, 0, 0.5], abs=1e-15)
    assert data["max_deviation"]["loss"] == {"value": 0.25, "step": 2}
    assert data["max_deviation"]["grad_norm"] == {"value": 0.5, "step": 3}
    # A skipped step has no norm; the others are equal.
    assert tensor["deviation"]["grad_norm"] == {"step": [1, 2], "value": [0, 0]}
    assert tensor["max_deviation"]["grad_norm"] == {"value": 0, "step": 1}
    assert data["final_loss"] == 0.9
    assert data["tokens_per_s"] == 700.0
    assert data["peak_memory_bytes"] == 7 * 2**20
    assert base["bytes_per_step"] == 0
    # Two blocks of 9,280 parameters are gathered twice and scattered once, all in 4 bytes; the
    # table and the head, of 258 padded rows of 32, and the last norm are gathered once.
    assert data["bytes_per_step"] == 2 * 9280 * 12 + 2 * 258 * 32 * 8 + 32 * 8
    # Activations of 8 * 32 tokens of 32 numbers cross four boundaries in each block, and one at
    # the embedding and at the head; three numbers a token make the loss.
    assert tensor["bytes_per_step"] == (2 * 4 + 2) * 8 * 32 * 32 * 4 + 3 * 8 * 32 * 4
    assert data["flags"] == ["--tp", "1"]
    assert data["versions"] == {"python": "3.11.0", "torch": "2.13.0"}


def test_against_a_reference_of_zero_the_deviation_is_one(tmp_path, three):
    write_run(tmp_path / "odd", "1x2", norm=[2.0, 1e-300, 1.0])
    runs = [str(three / "1x1"), str(tmp_path / "odd")]
    assert main(["--collect", *runs, "--out", str(tmp_path / "b")]) == 0
    entry = comparison_of(tmp_path / "b")["layouts"][1]
    assert entry["max_deviation"]["grad_norm"] == {"value": 1.0, "step": 2}


def test_the_table_is_plain_and_whole(three, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["--collect", "--out", str(three), "--no-reference"]) == 0
    text = capsys.readouterr().out
    assert not [c for c in text if ord(c) < 32 and c != "\n"]
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    assert lines[-2][0] == "2x1" and lines[-1][0].startswith("written: ")
    assert ["1x1", "1.000000", "reference", "reference", "700", "7", "0.0"] in lines
    loss, norm = "2.5e-01 @2, above bound from 2", "5.0e-01 @3, above bound from 1"
    assert ["2x1", "0.900000", loss, norm, "700", "7", "0.4"] in lines
    assert ["1x2", "1.000000", "0 (equal)", "0 (equal)", "700", "7", "0.3"] in lines
    assert lines[0] == [
        "final loss",
        "max loss deviation",
        "max grad norm deviation",
        "peak memory",
        "communicated",
    ]


def test_the_table_fits_an_ascii_terminal(three, tmp_path):
    assert main(["--collect", "--out", str(three)]) == 0
    with (tmp_path / "table.txt").open("w", encoding="ascii") as f:
        print_table(comparison_of(three), f)
    assert "2x1" in (tmp_path / "table.txt").read_text()


@pytest.fixture
def figures(monkeypatch):
    """The figures that are written, before they become pixels."""
    from matplotlib.figure import Figure

    written, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a: written.append(self) or save(self, *a))
    return written


@pytest.fixture
def sketches(monkeypatch):
    """The figures that would be written."""
    from matplotlib.figure import Figure

    written = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a: written.append(self))
    return written


def test_the_picture(three, figures):
    from matplotlib.image import imread

    assert main(["--collect", "--out", str(three)]) == 0
    pixels = imread(three / "loss_curves.png")
    assert pixels.shape == (1000, 1600, 4)
    grey = pixels[..., :3] @ [0.299, 0.587, 0.114]
    assert 0.02 < (grey < 0.9).mean() < 0.5
    (figure,) = figures
    loss, norm, loss_deviation, norm_deviation = figure.axes
    assert [axis.get_xlabel() for axis in figure.axes] == ["optimizer step"] * 4
    assert loss.get_ylabel() == "loss (nats per token)"
    assert norm.get_ylabel() == "gradient norm"
    assert loss_deviation.get_ylabel() == "loss: relative deviation from 1x1"
    assert norm_deviation.get_yscale() == "log"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["1x1", "1x2", "2x1", "rounding bound of float32"]
    assert "float32, 3 steps, global batch 8" in figure.get_suptitle()

    # Equal numbers lie on the floor, inside the panel, and its tick says 0.
    tensor, data, bound = loss_deviation.get_lines()[:3]
    floor = tensor.get_ydata()[0]
    assert 0 < loss_deviation.get_ylim()[0] < floor < 1e-6
    assert set(tensor.get_ydata()) == {floor}
    assert data.get_ydata() == pytest.approx([floor, 0.25, 0.1])
    assert loss_deviation.get_yticklabels()[0].get_text() == "0"
    assert bound.get_linestyle() == "--"
    assert bound.get_ydata() == pytest.approx(rounding_bound("float32", np.array([1, 2, 3])))
    # In greyscale: dash, marker and lightness all differ.
    lines = loss.get_lines()
    assert len({line.get_marker() for line in lines}) == 3
    assert len({str(line._dash_pattern) for line in lines}) == 3
    light = [np.dot(line.get_color()[:3], [0.299, 0.587, 0.114]) for line in lines]
    assert light[1] - light[0] > 0.2 and light[2] - light[1] > 0.2


def test_a_single_run_can_be_drawn(tmp_path, three):
    assert main(["--collect", str(three / "1x1"), "--out", str(tmp_path / "b")]) == 0
    assert len(comparison_of(tmp_path / "b")["layouts"]) == 1
    assert (tmp_path / "b" / "loss_curves.png").stat().st_size > 10_000


def test_runs_with_different_global_batches_are_different_trainings(tmp_path, figures, capsys):
    one = write_run(tmp_path / "a", "1x2")
    two = write_run(tmp_path / "b", "2x1", "--global-batch-size", "12")
    assert main(["--collect", str(one), str(two)]) == 0
    out = tmp_path / "runs" / "compare-collected"
    comparison = comparison_of(out)
    assert comparison["global_batches_differ"] and comparison["reference"] is None
    assert [entry["max_deviation"] for entry in comparison["layouts"]] == [None, None]
    assert "global batches differ" in figures[0].get_suptitle()
    assert [axis.get_xlabel() for axis in figures[0].axes] == ["optimizer step", "tokens"]
    assert figures[0].axes[1].get_lines()[1].get_xdata().tolist() == [384, 768, 1152]
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert legend == ["1x2, global batch 8", "2x1, global batch 12"]
    text = capsys.readouterr().out
    assert "note: the runs differ in --global-batch-size: 8, 12" in text
    assert "max loss deviation" not in text


def test_collect_names_what_differs_and_tells_equal_layouts_apart(tmp_path, three, capsys):
    other = write_run(tmp_path / "seed1", "2x1", "--seed", "1")
    out = tmp_path / "b"
    runs = [str(three / "2x1"), str(other), str(three / "1x1")]
    assert main(["--collect", *runs, "--out", str(out)]) == 0
    assert "note: the runs differ in --seed: 0, 1, 0" in capsys.readouterr().out
    comparison = comparison_of(out)
    assert comparison["reference"] == "1x1"
    assert [e["label"] for e in comparison["layouts"]] == [f"2x1 {runs[0]}", f"2x1 {other}", "1x1"]
    assert main(["--collect", *runs[1:], "--out", str(out), "--no-reference"]) == 0
    assert comparison_of(out)["reference"] == "2x1"


DIFFERING = {
    "lr": (["--lr", "0.02"], ["lr 0.01", "lr 0.02"], "the runs differ in --lr", True),
    "dtype": (
        ["--dtype", "float64"],
        ["dtype float32", "dtype float64"],
        "3 steps, global batch",
        True,
    ),
    "seed": (["--seed", "1"], ["seed 0", "seed 1"], "the runs differ in --seed", True),
    "model": (["--intermediate-size", "96"], ["intermediate size 64", "size 96"], None, False),
    "length of text": (["--seq-len", "64"], ["seq len 32", "seq len 64"], None, False),
    "data": (["--dataset", "stdlib"], ["dataset synthetic", "dataset stdlib"], None, False),
    "held out": (["--eval-fraction", "0.1"], ["eval fraction 0.01", "0.1"], None, False),
    "batch": (["--global-batch-size", "12", "--lr", "1"], ["lr 0.01", "lr 1.0"], None, False),
}


@pytest.mark.parametrize("name", DIFFERING)
def test_differences_are_in_the_picture_and_the_table(name, tmp_path, sketches, capsys):
    flags, words, title, compared = DIFFERING[name]
    runs = [write_run(tmp_path / "a", "1x2"), write_run(tmp_path / "b", "1x2", *flags)]
    assert main(["--collect", *map(str, runs), "--out", str(tmp_path / "c")]) == 0
    shown = sketches[0].get_suptitle()
    assert "one training" not in shown
    assert title is None or title in shown
    assert ("different trainings, without deviations" in shown) is not compared
    legend = [text.get_text() for text in sketches[0].legends[0].get_texts()]
    assert len(sketches[0].axes) == (4 if compared else 2)
    for label, word in zip(legend, words, strict=False):
        assert label.startswith("1x2, ") and word in label
    (headers, cells), text = table_rows(comparison_of(tmp_path / "c")), capsys.readouterr().out
    column = headers.index(flags[-2].removeprefix("--"))
    assert [row[column] for row in cells] == [word.split()[-1] for word in words]
    assert ("max loss deviation" in " ".join(text.split())) is compared


def test_runs_of_different_lengths_are_compared_as_far_as_both_go(tmp_path, sketches):
    long = write_run(tmp_path / "a", "1x2", loss=[4.0, 2.0, 1.0], norm=[1.0] * 3)
    short = write_run(tmp_path / "b", "2x1", "--lr-decay-steps", "3", loss=[4.0, 3.0], norm=[1] * 2)
    assert main(["--collect", str(long), str(short), "--out", str(tmp_path / "c")]) == 0
    length, title, over = sketches[0].get_suptitle().split("\n")
    assert "2 to 3 steps" in length
    assert title == "the runs differ in --steps; deviations are of the steps that both have"
    assert over == "above the bound: 2x1, steps 2 (from step 2)"
    comparison = comparison_of(tmp_path / "c")
    assert comparison["layouts"][1]["deviation"]["loss"] == {"step": [1, 2], "value": [0, 0.5]}
    assert [row[2] for row in table_rows(comparison)[1]] == ["1.000000 @3", "3.000000 @2"]


@pytest.mark.parametrize("name, content", [("--dataset", "equal"), ("--lr", "another")])
def test_data_are_compared_by_content(name, content, tmp_path, sketches):
    """A path may differ where a run was trained elsewhere, and stdlib holds what Python has."""
    values = {"--dataset": ["stdlib", "synthetic"], "--lr": ["0.01", "0.01"]}[name]
    runs = [write_run(tmp_path / x, "1x2", name, y) for x, y in zip("ab", values, strict=True)]
    tokens = {path: "equal" if content == "equal" else path.name for path in runs}
    with mock.patch("recipes.compare_layouts.differences._content", tokens.get):
        assert main(["--collect", *map(str, runs), "--out", str(tmp_path)]) == 0
    differing = {} if content == "equal" else {"tokens": ["a", "b"]}
    assert comparison_of(tmp_path)["differing_flags"] == differing


def test_runs_that_are_no_one_training_have_no_verdict(tmp_path, capsys, sketches):
    for layout in ("1x1", "2x1"):
        lr = ("--lr", "0.01" if layout == "1x1" else "0.02")
        write_run(tmp_path / layout, layout, *lr)
        write_run(tmp_path / "float64" / layout, layout, *lr)
    assert main(["--collect", "--out", str(tmp_path), "--verdict"]) == 1
    assert "cannot be judged: they differ in --lr, and are not one training" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("row", ['{"step": 1}', "[]", "{", "", '"x"', "NaN"])
def test_metrics_that_are_none_are_refused(row, three, capsys):
    (three / "2x1" / "metrics.jsonl").write_text(row and f"{row}\n")
    assert main(["--collect", str(three / "1x1"), str(three / "2x1")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(three / "2x1") in error


def test_steps_without_a_loss_leave_gaps(tmp_path, three, sketches):
    nothing = write_run(tmp_path / "none", "1x2", loss=[None] * 3, norm=[None] * 3)
    assert main(["--collect", str(three / "1x1"), str(nothing), "--out", str(tmp_path / "b")]) == 0
    comparison = comparison_of(tmp_path / "b")
    assert table_rows(comparison)[1][1][1:4] == ["none", "none", "none"]
    assert np.isnan(sketches[0].axes[0].get_lines()[1].get_ydata()).all()


BANNER = """E1130 22:53:11.2 8660 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9)
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
""".splitlines()  # noqa: E501
FAILED = {"state": "failed", "rank": 3, "step": 7, "error": "step 7: no \x1b[31mmemory"}


@pytest.mark.parametrize(
    ("status", "printed", "cause", "tail"),
    [
        (FAILED, ["a", *BANNER], "failed on rank 3 in step 7: no \\x1b[31mmemory", 2),
        (FAILED | {"step": None}, ["a"], "failed on rank 3: step 7: no \\x1b[31mmemory", 1),
        (None, ["train_llm.py: error: --lr", "W", *BANNER], "was refused: --lr", 3),
        ({"state": "stopped"}, ["x"] * 30, None, 20),
        (None, BANNER, None, 1),
    ],
)
def test_the_cause_comes_first(status, printed, cause, tail):
    """And torchrun's report, but for the exit code in its first line, is left out."""
    explained, lines = explain_failure(status, printed)
    assert (explained, len(lines)) == (cause, tail)


def test_collect_leaves_out_or_refuses_what_has_not_finished(tmp_path, three, capsys):
    (three / "2x1" / "status.json").write_text('{"state": "running"}')
    assert main(["--collect", "--out", str(three)]) == 0
    assert f"note: {three / '2x1'} has not finished and is left out" in capsys.readouterr().out
    assert [e["label"] for e in comparison_of(three)["layouts"]] == ["1x1", "1x2"]
    assert main(["--collect", str(three / "2x1")]) == 2
    assert "has not finished (its status is running)" in capsys.readouterr().err
    assert main(["--collect", str(tmp_path / "nothing")]) == 2
    assert "is no run directory" in capsys.readouterr().err
    (three / "1x1" / "metrics.jsonl").write_text("{torn")
    assert main(["--collect", str(three / "1x1")]) == 2
    assert "cannot be read (JSONDecodeError" in capsys.readouterr().err


COMPRESSED = ["--zero", "0", "--grad-compression"]
REFUSED = {
    "spelling": (["--layouts", "2y4"], ["'2y4'", "2x4"]),
    "zero": (["--layouts", "0x4"], ["'0x4'", "dp x tp"]),
    "heads": (["--layouts", "1x2", "1x3"], ["layout 1x3", "--num-attention-heads 4"]),
    "batch": (["--layouts", "1x2", "3x1"], ["layout 3x1", "--global-batch-size 8"]),
    "vocabulary": (
        ["--layouts", "3x4", "--global-batch-size", "12"],
        ["layout 3x4", "--vocab-size 257 is not a multiple of --tp 4"],
    ),
    "twice": (["--layouts", "1x2", "1x2"], ["1x2 more than once"]),
    "same layout": (["--layouts", "1x2", "dp1-tp2"], ["1x2 more than once"]),
    **{
        f"{name} of a layout": ([name, "2", "--layouts", "2x2"], [f"{name} is set", "--layouts"])
        for name in layout_flags("1x1")[::2]
    },
    "underscores": (["--dp_replicate=2"], ["--dp-replicate is set"]),
    "equals": (["--pp=2"], ["--pp is set"]),
    "name": (["--wandb-name", "x"], ["--wandb-name is set"]),
    "resume": (["--resume", "step-3"], ["--resume has no use in a comparison"]),
    "stop": (["--stop_after=1h"], ["--stop-after has no use in a comparison"]),
    "schedule": (
        ["--pp-schedule", "zbv", "--layouts", "1x2", "2x1"],
        ["--pp-schedule changes nothing in --layouts 1x1 1x2 2x1"],
    ),
    "schedule of one": (
        ["--pp-schedule", "zbv", "--layouts", "1x2", "pp2-dp1-tp1"],
        ["layout pp2-dp1-tp1: --pp 2 with --pp-schedule zbv"],
    ),
    "micro-batch of one": (
        ["--micro-batch-size", "8", "--layouts", "1x2", "2x1"],
        ["layout 2x1: --micro-batch-size 8", "4 sequences"],
    ),
    "run-dir": (["--run_dir=x"], ["--run-dir is set"]),
    "world": (["--world-size", "2"], ["--world-size is set"]),
    "steps": (["--steps", "0"], ["--steps", "greater than 0"]),
    "recipe": (["--recipe", "debgu"], ["--recipe debgu", "did you mean debug"]),
    "launcher": (["--launcher", "slurm"], ["--launcher", "slurm", "torchrun"]),
    "online": (["--wandb", "online", "--layouts", "1x2"], ["--wandb online", "WANDB_API_KEY"]),
    "verdict-alone": (["--layouts", "1x1", "--verdict"], ["--verdict", "only 1x1"]),
    "verdict-steps": (["--verdict-steps", "0"], ["--verdict-steps", "'0'", "positive"]),
    "batches": (["--batch-sizes", "1", "2"], ["2 values", "4 layouts"]),
    "batches-verdict": (
        ["--layouts", "1x2", "--batch-sizes", "4", "--verdict"],
        ["--verdict", "--batch-sizes"],
    ),
    "batches-global": (
        ["--layouts", "1x2", "--batch-sizes", "4", "--global-batch-size", "8"],
        ["--global-batch-size is set"],
    ),
    "compressed-tp": (
        [*COMPRESSED, "bf16", "--layouts", "1x2"],
        ["layout 1x2", "--grad-compression bf16", "--tp 2", "--tp 1"],
    ),
    "compressed-reference": (
        [*COMPRESSED, "bf16", "--layouts", "2x1", "4x1", "--verdict", "--no-reference"],
        ["--grad-compression bf16", "one process", "leave out --no-reference"],
    ),
    "compressed-steps": (
        [*COMPRESSED, "powersgd", "--layouts", "2x1", "--verdict", "--verdict-steps", "2"],
        ["--verdict-steps 2", "step 2", "--verdict-steps 3"],
    ),
    "collect-trains": (["--collect", "--out", "x"], ["--collect trains nothing"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line_before_anything_starts(name, capsys, tmp_path):
    argv, words = REFUSED[name]
    flags = STUDY if "--batch-sizes" in argv else MODEL
    assert main([*flags, *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("compare_layouts: error: ")
    for word in words:
        assert word in printed.err
    assert list(tmp_path.iterdir()) == []


def test_refused_without_training_flags(capsys):
    assert main(["--collect"]) == 2
    assert "--collect needs run directories" in capsys.readouterr().err
    assert main(["--layouts", "1x2", "--hidden-sise", "32"]) == 2
    assert "--hidden-size" in capsys.readouterr().err


def test_help_shows_our_flags_and_the_trainers(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    for name in ("--layouts", "--batch-sizes", "--collect", "--global-batch-size", "--lr"):
        assert name in text


# What stands for a training run: argv is run_dir, layout, step count, config, list of calls.
FAKE = """
import json, os, pathlib, sys, time
path, layout, steps, config, calls = sys.argv[1:6]
path, steps = pathlib.Path(path), int(steps)
with open(calls, "a") as f:
    f.write(" ".join([path.name, os.environ["WANDB_RUN_GROUP"], os.environ["OMP_NUM_THREADS"]]))
    f.write("\\n")
print("here is", layout, flush=True)
path.mkdir(parents=True, exist_ok=True)
if pathlib.Path(calls + ".wait").exists():
    pathlib.Path(calls + ".pid").write_text(str(os.getpid()))
    time.sleep(60)
if pathlib.Path(calls + ".fail-" + layout).exists():
    path.joinpath("status.json").write_text('{"state": "failed", "step": 2}')
    sys.exit("no more memory")
dp, tp = map(int, layout.split("x"))
start = {"layout": layout, "world_size": dp * tp, "command": ["train_llm.py"]}
path.joinpath("config.toml").write_text(config)
path.joinpath("run.json").write_text(json.dumps({"starts": [start]}))
with open(path / "metrics.jsonl", "w") as f:
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 4 / step, "grad_norm": 1.0, "tokens": step, "tokens_per_s": 1}
        f.write(json.dumps(row | {"peak_memory_bytes": None}) + "\\n")
path.joinpath("status.json").write_text(json.dumps({"state": "finished", "step": steps}))
"""


class Trainer:
    """Stands for train_llm.py and notes what it is asked to train."""

    def __init__(self, folder: Path):
        self.file, self.planned = folder / "calls", {}

    def command(self, run) -> list[str]:
        self.planned[run.name] = run
        config = run.config.model_copy(deep=True)
        config.model.vocab_size = 257
        dp_tp = run.run_dir.name
        words = [run.run_dir, dp_tp, run.config.step.steps, to_toml(config), self.file]
        return [sys.executable, "-c", FAKE, *map(str, words)]

    def calls(self) -> list[str]:
        """The layouts that were trained since the last call."""
        text = self.file.read_text() if self.file.exists() else ""
        self.file.unlink(missing_ok=True)
        return [line.split()[0] for line in text.splitlines()]


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    fake = Trainer(tmp_path)
    monkeypatch.setattr(PlannedRun, "command", property(fake.command))
    # What is drawn is tested elsewhere, and takes longer than all else here.
    monkeypatch.setattr(compare_layouts, "draw", lambda comparison, path: path.touch())
    return fake


def test_a_comparison_goes_on_where_it_stopped(trainer, tmp_path, capsys):
    command = [*MODEL, "--steps", "4", "--layouts", "1x2", "2x1", "--out", "out"]
    failing = tmp_path / "calls.fail-1x2"
    failing.touch()
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "1x2 ended with exit code 1, status failed; the end of out/1x2.log:" in error
    assert error.endswith("  here is 1x2\n  no more memory\n")
    assert trainer.file.read_text() == "1x1 out 1\n1x2 out 1\n"
    assert trainer.calls() == ["1x1", "1x2"]
    assert not (tmp_path / "out" / "comparison.json").exists()

    failing.unlink()
    assert main(command) == 0
    assert trainer.calls() == ["1x2", "2x1"]
    text = capsys.readouterr().out
    assert "1x1: has finished before, not run again" in text
    assert "2x1: 4 steps in" in text and "loss 1.0000" in text
    assert comparison_of(tmp_path / "out")["flags"] == command[: command.index("--layouts")]
    assert main(command) == 0
    assert trainer.calls() == []

    # Finished, but too early; and a layout more.
    (tmp_path / "out" / "2x1" / "status.json").write_text('{"state": "finished", "step": 3}')
    assert main([*command, "--layouts", "2x1", "2x2"]) == 0
    assert trainer.calls() == ["2x1", "2x2"]
    labels = [entry["label"] for entry in comparison_of(tmp_path / "out")["layouts"]]
    assert labels == ["1x1", "2x1", "2x2"]


def test_another_comparison_is_refused_in_its_directory(trainer, tmp_path, capsys):
    command = [*MODEL, "--steps", "4", "--layouts", "2x1", "--out", "out"]
    assert main(command) == 0
    trainer.calls()
    capsys.readouterr()
    assert main([*command, "--lr", "0.02"]) == 2
    assert capsys.readouterr().err == (
        "compare_layouts: error: --lr 0.02 differs from the 0.01 of the comparison in out: "
        "use the same flags, or another --out\n"
    )
    assert main([*command, "--steps", "5"]) == 2
    assert "--steps 5 differs from the 4" in capsys.readouterr().err
    # The same values in another spelling, and what changes no curve.
    assert main([*command, "--lr=1e-2", "--comm-timeout", "60"]) == 0
    assert trainer.calls() == []

    write_run(tmp_path / "other" / "2x1", "2x1")
    assert main([*command[:-1], "other"]) == 2
    assert "other/2x1 is not of a comparison" in capsys.readouterr().err
    (tmp_path / "out" / "comparison_flags.json").write_text("{")
    assert main(command) == 2
    assert "comparison_flags.json cannot be read" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main([*command[:-1], "file"]) == 2
    assert "--out file is not writable" in capsys.readouterr().err


def test_the_runs_differ_in_their_layout_alone(trainer):
    command = [*MODEL, "--steps", "4", "--sequence-parallel", "on", "--layouts", "2x1", "1x2"]
    assert main([*command, "--wandb", "disabled"]) == 0
    assert list(trainer.planned) == ["1x1", "2x1", "1x2"]
    runs = trainer.planned.values()
    assert [run.processes for run in runs] == [1, 2, 2]
    assert [str(run.run_dir) for run in runs] == [
        f"runs/compare-debug/{name}" for name in trainer.planned
    ]
    assert {run.config.layout.sequence_parallel for run in runs} == {"on"}
    assert {run.config.run.wandb for run in runs} == {"disabled"}
    config = trainer.planned["1x2"].config
    assert (config.layout.tp, config.step.seed, config.step.global_batch_size) == (2, 0, 8)


def test_the_command_that_starts_a_run(tmp_path):
    run = PlannedRun("2x1", tmp_path / "2x1", 2, ["--tp", "1"], None)
    script = str(REPO / "train_llm.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert run.command == [sys.executable, *torchrun, script, "--tp", "1"]
    alone = PlannedRun("1x1", tmp_path / "1x1", 1, ["--tp", "1"], None)
    assert alone.command == [sys.executable, script, "--tp", "1"]


def test_the_batch_size_study(trainer, figures, monkeypatch):
    monkeypatch.setattr(compare_layouts, "draw", draw)
    command = [*STUDY, "--steps", "4", "--layouts", "1x2", "2x1", "--out", "out"]
    assert main([*command, "--batch-sizes", "6", "5"]) == 0
    assert trainer.calls() == ["1x2", "2x1"]
    steps = {name: run.config.step for name, run in trainer.planned.items()}
    assert (steps["1x2"].micro_batch_size, steps["1x2"].global_batch_size) == (6, 6)
    assert (steps["2x1"].micro_batch_size, steps["2x1"].global_batch_size) == (5, 10)
    assert "global batches differ" in figures[0].get_suptitle()
    assert main([*command, "--batch-sizes", "6", "4"]) == 2
    assert main(command) == 2


VERDICTS = {
    "rounding": (None, 0, "2x1: rounding (largest float64 deviation 1.2e-15)"),
    "bug": ("step 1, loss is 2.0", 1, "2x1: BUG: step 1, loss is 2.0"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_decides_the_exit_code(name, trainer, tmp_path, monkeypatch, capsys):
    finding, code, line = VERDICTS[name]
    asked = []

    def judge(reference, runs, lossy):
        asked.append((str(reference), {key: str(value) for key, value in runs.items()}))
        return [Verdict("1x2", 0.0, None), Verdict("2x1", 1.2e-15, finding)]

    monkeypatch.setattr(compare_layouts, "judge", judge)
    command = [*MODEL, "--steps", "4", "--layouts", "1x2", "2x1", "--out", "out"]
    assert main([*command, "--verdict", "--verdict-steps", "2"]) == code
    assert trainer.calls() == ["1x1", "1x2", "2x1"] * 2
    assert asked == [("out/float64/1x1", {"1x2": "out/float64/1x2", "2x1": "out/float64/2x1"})]
    lines = capsys.readouterr().out.splitlines()
    assert line in lines
    assert "1x2: rounding (largest float64 deviation 0.0e+00)" in lines
    assert [v["finding"] for v in comparison_of(tmp_path / "out")["verdict"]] == [None, finding]
    config = trainer.planned["float64/2x1"].config
    assert (config.step.dtype, config.step.steps) == ("float64", 2)
    assert (config.optimizer.lr_decay_steps, config.run.fingerprint_steps) == (4, 2)
    assert (config.run.log_every, config.run.checkpoint_every, config.data.eval_every) == (1, 0, 0)
    assert trainer.planned["2x1"].config.step.dtype == "float32"
    # The same command, and --collect, judge again without training.
    assert main([*command, "--verdict", "--verdict-steps", "2"]) == code
    assert main(["--collect", "--out", "out", "--verdict"]) == code
    assert len(asked) == 3 and asked[2] == asked[0]
    assert trainer.calls() == []
    assert main([*command, "--verdict"]) == 2
    assert "--verdict-steps 3 differs from the 2" in capsys.readouterr().err


def test_compressed_gradients_are_lossy_by_intent(three, capsys, figures):
    """The bound that is drawn, the label, and what the runs differ in."""
    out, flags = three.parent / "out2", ("--zero", "0", "--grad-compression", "bf16")
    write_run(out / "1x1", "1x1", *flags)
    write_run(out / "2x1", "2x1", *flags)
    for layout in ("1x1", "2x1"):
        write_run(out / "float64" / layout, layout, *flags)

    def judge(reference, runs, lossy):
        # One process sends nothing, whatever its flags say.
        assert lossy == {"1x1": None, "2x1": Lossy("bf16", 2)}
        return [Verdict("2x1", 2e-3, None, 4e-2)]

    with mock.patch.object(compare_layouts, "judge", judge):
        assert main(["--collect", "--out", str(out), "--verdict"]) == 0
    text = capsys.readouterr().out
    assert "2x1: lossy, as --grad-compression bf16 is (largest float64 deviation 2.0e-03" in text
    comparison = comparison_of(out)
    assert [cells[-1] for cells in table_rows(comparison)[1]] == ["reference", "lossy"]
    assert comparison["rounding_bound"]["loss"][2] == Lossy("bf16", 2).bound(3, "loss")
    legend = [words.get_text() for words in figures[0].legends[0].get_texts()]
    assert legend[-1] == "rounding bound of float32 and bf16"
    assert [entry["bytes_per_step"] for entry in comparison["layouts"]][1] == 2 * (
        2 * 9280 + 2 * 257 * 32 + 32
    )

    assert main(["--collect", str(three / "2x1"), str(out / "2x1"), "--out", str(three)]) == 0
    assert "the runs differ in --grad-compression: none, bf16" in capsys.readouterr().out
    reference = ["--collect", "--out", str(out), "--verdict", "--no-reference"]
    (out / "1x1" / "status.json").write_text('{"state": "running"}')
    assert main(reference) == 1
    assert "reference 2x1 are compressed themselves" in capsys.readouterr().err


def test_runs_that_cannot_be_judged_are_no_verdict(trainer, monkeypatch, capsys):
    def judge(reference, runs, lossy):
        raise ValueError("did not record the same steps")

    monkeypatch.setattr(compare_layouts, "judge", judge)
    assert main([*MODEL, "--steps", "4", "--layouts", "1x2", "--verdict"]) == 1
    assert "cannot be judged: did not record the same steps" in capsys.readouterr().err
    endless = [Verdict("1x2", math.inf, "step 1, loss is None")]
    monkeypatch.setattr(compare_layouts, "judge", lambda *runs: endless)
    assert main([*MODEL, "--steps", "4", "--layouts", "1x2", "--verdict"]) == 1
    verdicts = comparison_of(Path("runs/compare-debug"))["verdict"]
    line = {"layout": "1x2", "deviation": None, "finding": "step 1, loss is None", "bound": None}
    assert verdicts == [line]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_the_run(number, code, tmp_path):
    calls = tmp_path / "calls"
    (tmp_path / "calls.wait").touch()
    (tmp_path / "train.py").write_text(
        f"import sys\nsys.argv[1:] = ['out/1x1', '1x1', '4', '', {str(calls)!r}]\n{FAKE}"
    )
    program = (
        "import sys, pathlib; from recipes.compare_layouts import command, runs; "
        "runs.TRAIN = pathlib.Path('train.py'); sys.exit(command.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *MODEL, "--layouts", "1x1", "--out", "out"]
    environ = os.environ | {"PYTHONPATH": str(REPO)}
    # A shell that starts the tests in the background has them ignore SIGINT.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, preexec_fn=heed
    )
    pid, deadline = tmp_path / "calls.pid", time.monotonic() + 60
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)  # on a busy machine the child is faster than the parent's return from the fork
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == code
    assert (b"start the same command again" in error) == (code == 130)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_the_newest_whole_row_is_read(tmp_path):
    assert last_row(tmp_path) is None
    rows = "".join(json.dumps({"step": i, "x": "y" * 90}) + "\n" for i in range(100))
    (tmp_path / "metrics.jsonl").write_text(rows + '{"step": 100, "x"')
    assert last_row(tmp_path)["step"] == 99


def test_a_real_comparison_and_again(tmp_path, capfd):
    command = [*MODEL, "--steps", "4", "--layouts", "1x2", "2x1", "--wandb", "offline"]
    command += ["--out", str(tmp_path / "real")]
    assert main(command) == 0
    out = tmp_path / "real"
    comparison = comparison_of(out)
    assert [entry["label"] for entry in comparison["layouts"]] == ["1x1", "1x2", "2x1"]
    for entry in comparison["layouts"]:
        assert entry["curve"]["step"] == [1, 2, 3, 4]
        assert entry["curve"]["loss"][3] < entry["curve"]["loss"][0]
        assert entry["max_deviation"]["loss"]["value"] < 1e-5
        assert entry["peak_memory_bytes"] > 2**20
        # The trainer's own run, and its group.
        (offline,) = (out / entry["label"] / "wandb").glob("offline-run-*")
        assert b"real" in next(offline.glob("*.wandb")).read_bytes()
    assert len({differences._content(out / name) for name in LOSS} - {None}) == 1
    starts = [json.loads((out / n / "run.json").read_text())["starts"] for n in LOSS]
    assert [len(s) for s in starts] == [1, 1, 1]
    assert [s[0]["layout"] for s in starts] == ["1x1", "2x1", "1x2"]
    (summary,) = (out / "wandb").glob("offline-run-*")
    written = b"".join(p.read_bytes() for p in summary.rglob("*") if p.is_file())
    assert b"max loss deviation relative @step" in written and b"\x89PNG" in written
    assert "upload with: wandb sync" in capfd.readouterr().out

    assert main([*command, "--wandb", "disabled"]) == 0
    assert "2x1: has finished before, not run again" in capfd.readouterr().out
    again = [len(json.loads((out / n / "run.json").read_text())["starts"]) for n in LOSS]
    assert again == [1, 1, 1]
