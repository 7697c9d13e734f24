"""Why a run ends before its last step. Torch-free."""

from training.run.launcher import GONE

# Why a run stops before its last step; the first that holds is the one that is said.
SIGNAL, TIME = "a rank received a signal", "the time of --stop-after is over"
LOST = "the run directory is not that of this start any more"
REASONS = (LOST, SIGNAL, GONE, TIME)


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm was not finite; the weights are those before that step."""

    def __init__(self, step: int, ranks: list[int], what: str):
        self.step, self.ranks = step, ranks
        names = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
        super().__init__(
            f"step {step}: {what} is not finite on {names}; that step changed nothing, "
            "and no checkpoint holds it"
        )
