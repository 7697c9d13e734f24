"""common/output.py: commands whose output nobody reads, or nothing can take."""

import json
import os
import subprocess
import sys

import pytest

from tests.runs import REPO, SMALL, forked

SINKS = {
    "gone": ("| true", ""),
    "full": ("> /dev/full", "error: stdout cannot be written (No space left on device)\n"),
    "closed": (">&-", "error: stdout cannot be written (Bad file descriptor)\n"),
}
# A line is kept in a buffer until the end; a page is more than one holds.
LINE = "-c", "from common.output import run_command; run_command(lambda: print('x'), 'c')"
PAGE = LINE[0], LINE[1].replace("'x'", "'x' * 99999")
RAISED = LINE[0], LINE[1].replace("print('x')", "open('/dev/full', 'wb', 0).write(b'x')")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("words", [LINE, PAGE], ids=["line", "page"])
def test_output_that_nothing_takes(words, sink, unbuffered):
    redirection, line = SINKS[sink]
    script = f'set -o pipefail; "$@" {redirection}'
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = ["bash", "-c", script, "bash", sys.executable, *words]
    done = subprocess.run(command, cwd=REPO, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"c: {line}" if line else "")


@pytest.mark.parametrize(
    "command",
    [
        ["train_llm.py", "--help"],
        ["-m", "recipes.plan", "--help"],
        ["-m", "recipes.compare_layouts", "--help"],
        ["-m", "recipes.generate", "--help"],
        ["-m", "launch.slurm", "--help"],
    ],
)
def test_every_command_says_it_in_a_line(command):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *command], cwd=REPO, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr.endswith("error: stdout cannot be written (No space left on device)\n")
    assert done.stderr.count("\n") == 1


def test_another_error_is_not_taken_for_that():
    done = subprocess.run([sys.executable, *RAISED], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("Traceback")


def close_stdout() -> None:
    """As Python starts with a stdout that is closed."""
    os.close(1)
    sys.stdout = None


def test_a_run_goes_on_without_stdout(tmp_path):
    """Closed from the start; a full one is tested with the reporter."""
    flags = [*SMALL, "--steps", "2", "--run-dir", tmp_path / "run"]
    code, _, error = forked(*flags, first=(close_stdout,))
    assert (code, error) == (0, "")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"
