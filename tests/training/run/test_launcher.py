"""Whether a rank notices that its torchrun has ended, and what torchrun is given to print."""

import json
import subprocess
import sys

import pytest

from tests.runs import REPO
from training.run.launcher import report_failure

CHILD = """
import time
from training.run.launcher import Launcher
launcher = Launcher()
print(launcher.gone(), flush=True)
deadline = time.monotonic() + float({patience})
while not launcher.gone() and time.monotonic() < deadline:
    time.sleep(0.02)
print(launcher.gone(), flush=True)
"""
PARENT = """
import os, subprocess, sys, time
mark, *words = sys.argv[1:]
subprocess.Popen(words, env=os.environ | ({"TORCHELASTIC_RUN_ID": "none"} if mark else {}))
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("mark", "wrapped", "notices"),
    [("mark", False, True), ("mark", True, True), ("", False, False)],
    ids=["torchrun", "torchrun-and-a-wrapper", "nohup"],
)
def test_the_end_of_torchrun_is_noticed(mark, wrapped, notices, no_launcher):
    words = [sys.executable, "-c", CHILD.format(patience=20 if notices else 0.5)]
    if wrapped:
        words = ["sh", "-c", '"$0" "$@"; true', *words]
    launcher = subprocess.Popen(
        [sys.executable, "-c", PARENT, mark, *words], cwd=REPO, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout.readline() == "False\n"
    launcher.kill()
    launcher.wait()
    assert launcher.stdout.readline() == f"{notices}\n"
    launcher.stdout.close()


def test_torchrun_reads_what_a_rank_reports(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    report_failure("nobody asks")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    report_failure("rank 1 on vm is in no collective")
    assert json.loads((tmp_path / "error.json").read_text())
    failure = ProcessFailure(0, 7, 1, str(tmp_path / "error.json"))
    text = ChildFailedError("train_llm.py", {0: failure}).format_msg()
    assert "traceback : rank 1 on vm is in no collective\n" in text
