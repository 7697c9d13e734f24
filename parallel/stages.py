"""Pipeline stages: which blocks and ranks they are, and what each schedule asks for. Torch-free."""

import itertools
from dataclasses import dataclass

from models.config import LlamaConfig


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule of ``torch.distributed.pipelining``.

    Attributes:
        torch_name: name of its class.
        stages_per_rank: stages that each pipeline rank holds.
        v_shaped: a rank holds stages r and n - 1 - r; otherwise r, r + pp, r + 2 pp, ...
        splits_backward: gradients of weights are computed apart from those of inputs.
    """

    torch_name: str
    stages_per_rank: int = 1
    v_shaped: bool = False
    splits_backward: bool = False


SCHEDULES = {
    "gpipe": Schedule("GPipe"),  # Huang et al. 2019
    "1f1b": Schedule("1F1B"),  # Narayanan et al. 2019
    "interleaved": Schedule("Interleaved1F1B", 2),  # Narayanan et al. 2021
    "zbv": Schedule("ZBVZeroBubble", 2, v_shaped=True, splits_backward=True),  # Qi et al. 2024
    "dualpipev": Schedule("DualPipeV", 2, v_shaped=True, splits_backward=True),  # DeepSeek-V3 2024
}


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks of the model; the first stage also embeds, the last has norm and head.

    Attributes:
        index: position in the pipeline.
        count: number of stages of the whole pipeline.
        pp_rank: coordinate of the ranks that hold it.
        blocks: numbers of its blocks.
    """

    index: int
    count: int
    pp_rank: int
    blocks: range

    @property
    def first(self) -> bool:
        """Whether it holds the token embedding, and reads the inputs."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it holds the final norm and the head, and reads the targets."""
        return self.index == self.count - 1


def micro_batches_needed(schedule: str, pp: int, micro_batches: int) -> str | None:
    """What a schedule needs, in words, if ``micro_batches`` is not it; None if it is."""
    least = {"gpipe": 1, "1f1b": pp, "interleaved": pp, "zbv": 2 * pp, "dualpipev": 2 * pp}
    if micro_batches < least[schedule]:
        return f"at least {least[schedule]} micro-batches"
    if schedule == "interleaved" and micro_batches % pp:
        return f"a multiple of {pp} micro-batches"
    return None


def make_stages(model: LlamaConfig, schedule: str, pp: int, seq_len: int) -> list[Stage]:
    """All stages of a pipeline in order. ``model.vocab_size`` must be set."""
    kind = SCHEDULES[schedule]
    count = pp * kind.stages_per_rank
    stages = []
    for index, blocks in enumerate(balanced_blocks(model, count, seq_len)):
        back = kind.v_shaped and index >= pp
        pp_rank = count - 1 - index if back else index % pp
        stages.append(Stage(index, count, pp_rank, blocks))
    return stages


def balanced_blocks(model: LlamaConfig, stages: int, seq_len: int) -> list[range]:
    """Cut the blocks for ``stages`` stages so that the slowest is as fast as possible.

    Cost is multiplications per token of the forward: those of the matrices, and of attention to
    half a sequence on average. The head counts as what it is; a lookup costs nothing, so that the
    embedding decides by its size between splits that are equally fast, and evenness after that.
    Exact, by dynamic programming over (blocks, stages), without stages that alone are slower than
    an even split.
    """
    layers, head = model.num_hidden_layers, model.vocabulary * model.hidden_size
    attention = seq_len * model.num_attention_heads * model.head_size
    parameters = (model.num_matmul_parameters - head) // layers
    block = parameters + attention

    def cost(blocks: int, stage: int) -> tuple[int, int, int]:
        ends = (stage == 0) + (stage == stages - 1)
        last = head if stage == stages - 1 else 0
        return blocks * block + last, blocks * parameters + ends * head, blocks**2

    even = -(-layers // stages)
    slowest_even = max(even * block, (layers // stages) * block + head)
    longest = slowest_even // block
    # best[n]: how bad the best split of the first n blocks into the stages so far is, and its ends.
    best: dict[int, tuple[tuple[int, int, int], tuple[int, ...]]] = {0: ((0, 0, 0), (0,))}
    for stage in range(stages):
        costs = [cost(blocks, stage) for blocks in range(longest + 1)]
        longer = {}
        for end in range(stage + 1, layers - (stages - 1 - stage) + 1):
            options = []
            for start in range(max(0, end - longest), end):
                if start in best:
                    (slowest, largest, squares), ends = best[start]
                    time, size, square = costs[end - start]
                    badness = max(slowest, time), max(largest, size), squares + square
                    options.append((badness, ends))
            if options:
                badness, ends = min(options, key=lambda option: option[0])
                longer[end] = badness, (*ends, end)
        best = longer
    return [range(*ends) for ends in itertools.pairwise(best[layers][1])]


def bubble_fraction(schedule: str, pp: int, micro_batches: int) -> float:
    """Part of a step in which a rank waits, where a backward takes twice as long as a forward and
    stages and micro-batches are equal.

    (pp - 1) / (m + pp - 1) for GPipe and 1F1B; the interleaved schedule divides the wait by its
    stages per rank (Narayanan et al. 2021); the V-shaped ones fill it with gradients of weights.
    """
    wait, work = pp - 1, micro_batches
    if schedule == "interleaved":
        work *= 2
    elif SCHEDULES[schedule].splits_backward:
        work *= 6
    return wait / (work + wait)
