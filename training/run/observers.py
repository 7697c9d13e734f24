"""What observes a run."""

from dataclasses import dataclass

from training.run.fingerprints import Fingerprints
from training.run.heartbeat import Heartbeat
from training.run.metrics import Meter
from training.run.profiler import Profiler
from training.run.reporter import Reporter


@dataclass(frozen=True)
class Observers:
    """What is told of every step.

    Attributes:
        reporter: shows and writes the metrics; None on all ranks but the first.
        meter: times the steps.
        heartbeat: is told the step and phase, and watches that they go on.
        fingerprints: records the first steps of the run for a comparison.
        profiler: records chosen steps.
    """

    reporter: Reporter | None
    meter: Meter
    heartbeat: Heartbeat
    fingerprints: Fingerprints
    profiler: Profiler
