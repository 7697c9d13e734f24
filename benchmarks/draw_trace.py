"""A picture of what --profile has recorded: the phases of each rank, its waits, and its memory.

python -m benchmarks.draw_trace runs/debug/profile step.png --ranks 0 1
"""

import gzip
import json
import sys
from pathlib import Path

from training.config.command_line import Parser

PHASES = {"forward": "C0", "backward": "C1", "gradient norm": "C2", "update": "C3"}


def read(folder: Path, rank: int) -> list[dict]:
    """The events of one rank."""
    with gzip.open(folder / f"trace-rank-{rank:05d}.json.gz", "rt") as f:
        return json.load(f)["traceEvents"]


def spans(events: list[dict], wanted) -> list[tuple[float, float]]:
    """(start, length) in microseconds of the spans whose name is ``wanted``."""
    return [(e["ts"], e["dur"]) for e in events if e.get("ph") == "X" and wanted(e["name"])]


def is_communication(name: str) -> bool:
    """Whether a span is one in which a rank sends, or waits for others."""
    return name.startswith(("c10d::", "_c10d_functional::"))


def main() -> int:
    """Draw, and write the file."""
    parser = Parser(prog="python -m benchmarks.draw_trace", description=__doc__)
    parser.add_argument("folder", type=Path, help="profile/ of a run directory")
    parser.add_argument("out", type=Path, help="the picture to write")
    parser.add_argument("--ranks", nargs="+", type=int, default=[0])
    options = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    traces = {rank: read(options.folder, rank) for rank in options.ranks}
    everything = [e["ts"] for events in traces.values() for e in events if e.get("ph") == "X"]
    zero = min(ts for ts in everything if ts > 0)
    figure, (lanes, memory) = plt.subplots(
        2,
        1,
        sharex=True,
        figsize=(10, 1.5 + len(traces) + 1.5),
        height_ratios=[len(traces) * 2, 3],
        layout="constrained",
    )

    def ms(found: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [((start - zero) / 1e3, length / 1e3) for start, length in found]

    for row, (rank, events) in enumerate(traces.items()):
        for phase, color in PHASES.items():
            bars = ms(spans(events, lambda name, phase=phase: name == phase))
            label = phase if row == 0 else None
            lanes.broken_barh(bars, (2 * row + 0.9, 0.7), color=color, label=label)
        waits = ms(spans(events, is_communication))
        label = "communication" if row == 0 else None
        lanes.broken_barh(waits, (2 * row + 0.2, 0.6), color="0.35", label=label)
        found = [e for e in events if e["name"] == "[memory]"]
        at = [(e["ts"] - zero) / 1e3 for e in found]
        memory.plot(at, [e["args"]["Total Allocated"] / 2**20 for e in found], label=f"rank {rank}")
    lanes.set_yticks([2 * row + 0.9 for row in range(len(traces))])
    lanes.set_yticklabels([f"rank {rank}" for rank in traces])
    lanes.invert_yaxis()
    lanes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.25), frameon=False)
    memory.set_xlabel("ms")
    memory.set_ylabel("allocated since\nthe start, MiB")
    memory.legend(frameon=False)
    figure.savefig(options.out, dpi=110)
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
