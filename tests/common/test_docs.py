"""What the docs say that can be checked without running it: fields, and command lines."""

import json
import re
import shlex
from pathlib import Path

import pytest

from launch.slurm.__main__ import check_run as check_job
from launch.slurm.__main__ import parse_command as parse_job
from parallel.launch import Launch
from recipes.compare_layouts import plan as compare_layouts
from recipes.plan import __main__ as plan
from tests.runs import REPO, rows, train
from training.config.command_line import parse_flags
from training.start import check_ahead

PAGES = [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").glob("*.md"))]


def documented(heading: str) -> list[set[str]]:
    """The fields in each table of a section of docs/metrics.md."""
    text = (REPO / "docs/metrics.md").read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section + "\n", re.MULTILINE)
    return [set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) for table in tables]


def test_every_field_of_a_run_is_documented(launched2, tmp_path):
    flags = ["--steps", 2, "--eval-every", 1, "--eval-batches", 1]
    train(launched2, tmp_path, *flags)
    sometimes = {"non_finite"}
    for file in ("metrics.jsonl", "eval.jsonl"):
        (fields,) = documented(file)
        assert {*rows(tmp_path, file)[0]} | sometimes == fields, file
    (fields,) = documented("status.json")
    of_others = {"reason", "rank", "error", "checkpoint_fault"}
    assert json.loads((tmp_path / "status.json").read_text()).keys() | of_others == fields
    record = json.loads((tmp_path / "run.json").read_text())
    assert [record.keys(), record["starts"][0].keys()] == documented("run.json")


def commands(page: Path) -> list[str]:
    """The lines of a page that start one of our commands, continued lines put together."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^    (.*)$", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    ours = re.compile(r"(train_llm\.py|-m (recipes|launch)\.\w+) +-")
    # Of several commands in a row, the last.
    return [line.split("&&")[-1].strip() for line in lines if ours.search(line)]


PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]{2,}\b|\.\.\.|[$<>*]|\bN\b")
COMMANDS = sorted({line for page in PAGES for line in commands(page)})
COMPLETE = [line for line in COMMANDS if not PLACEHOLDER.search(line.split("=", 1)[-1])]


def test_commands_are_found():
    assert len(COMPLETE) > 15 and any("compare_layouts" in line for line in COMPLETE)


@pytest.mark.parametrize("line", COMPLETE)
def test_a_command_of_the_docs_is_accepted(line, tmp_path, monkeypatch):
    """Parsed and checked as it starts, with as many processes as it says."""
    monkeypatch.chdir(tmp_path)
    # A command may come after variables, and a launcher with options of its own.
    launcher, script, rest = re.match(r"(.*?)(train_llm\.py|-m [\w.]+)(.*)", line).groups()
    words = shlex.split(rest, comments=True)
    if "--help" in words:
        return
    if script == "train_llm.py":
        number = re.search(r"--nproc-per-node[ =](\d+)", launcher)
        config = parse_flags(words, console=False)
        world_size = config.layout.world_size or int(number[1] if number else 1)
        check_ahead(config, Launch(0, world_size, 0, world_size))
    elif script == "-m recipes.compare_layouts":
        options, flags = compare_layouts.parse_command(words)
        if options.collect is None:
            compare_layouts.plan_runs(options, flags)
    elif script == "-m recipes.plan":
        plan.parse_command(words)
    elif script == "-m launch.slurm":
        check_job(*parse_job(words))
    else:
        pytest.skip("has no parser of its own to call")
