"""Whether the rank that is stuck is named, in several phases and layouts: real runs of four ranks.

    python -m tests.stuck

In each, rank 1 stays in a phase, asleep or stopped. Exit code: how many are named wrongly.
"""

import itertools
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from tests.ranks import Group, RankError, free_port
from tests.runs import SMALL, run_main

STUCK = 1
LAYOUTS = {"2x2": ["--tp", 2], "pp2-dp1-tp2": ["--pp", 2, "--tp", 2]}
PHASES = {
    "forward": ("models.layers.MLP.forward", 11),
    "evaluation": ("training.evaluate.eval_batches", 1),
    "save": ("training.checkpoint.saver.CheckpointWriter.write_data", 1),
}
HOW = ("asleep", "stopped")


def hang(argv: list[str], port: int, phase: str, how: str):
    """Train, and have one rank stay where the phase has called its function so many times."""
    import pkgutil

    target, count = PHASES[phase]
    real, calls = pkgutil.resolve_name(target), itertools.count(1)

    def stuck(*args, **kwargs):
        if os.environ["RANK"] == str(STUCK) and next(calls) == count:
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(10**6)
        return real(*args, **kwargs)

    with mock.patch(target, stuck):
        return run_main(argv, port)


def named(layout: str, phase: str, how: str, run_dir: Path) -> dict:
    """What status.json says of such a run."""
    group = Group(4, process_group=False)
    argv = [*SMALL, *LAYOUTS[layout], "--run-dir", run_dir, "--steps", 9, "--comm-timeout", 5]
    argv += ["--checkpoint-every", 3]
    argv += ["--eval-every", 2, "--eval-batches", 1] if phase == "evaluation" else []
    try:
        group.run(hang, [str(word) for word in argv], free_port(), phase, how)
    except RankError:
        return json.loads((run_dir / "status.json").read_text())
    finally:
        group.close()
    return {}


def main() -> int:
    """Try all of them; how many were named wrongly."""
    wrong = 0
    for case in itertools.product(LAYOUTS, PHASES, HOW):
        with tempfile.TemporaryDirectory() as folder:
            found = named(*case, Path(folder))
        right = found.get("state") == "failed" and found.get("rank") == STUCK
        wrong += not right
        print(*case, "right" if right else "WRONG", found.get("error"), sep=": ", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
