"""The one schema of a run. Torch-free.

Every table of a recipe is a group of ``--help``, and every key has the name of its flag with
underscores.
"""

import difflib
from pathlib import Path
from typing import Annotated, Literal, get_args

import pydantic
import tyro
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from common.errors import ConfigError
from models.config import LlamaConfig, PositiveFloat, RopeScaling
from training.config.values import (
    Beta,
    Checkpointing,
    CleanPath,
    Duration,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Place,
    Ranks,
    Seed,
    Sequences,
    StepRange,
    Steps,
    Text,
    Timeout,
    Tokens,
    older_batch_size,
    older_checkpointing,
    whole,
)


class Section(BaseModel):
    """A table of the recipe: unknown keys and values out of range raise :class:`ConfigError`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    def __init__(self, **values):
        try:
            super().__init__(**values)
        except ValidationError as error:
            location = error.errors()[0]["loc"]
            raise ConfigError(_one_line(error, type(self)), location) from None


class LayoutSection(Section):
    """How the model is laid out over the processes. What is left is data parallel."""

    tp: Ranks = Field(1, description="Tensor-parallel ranks; 1 turns it off.")
    cp: Ranks = Field(
        1,
        description="Context-parallel ranks, which shard every sequence; 1 turns it off.",
    )
    pp: Ranks = Field(
        1,
        description="Pipeline-parallel ranks, each with a part of the blocks; 1 turns it off.",
    )
    pp_schedule: Literal["1f1b", "gpipe", "interleaved", "zbv", "dualpipev"] = Field(
        "1f1b",
        description="Order of the micro-batches in the pipeline. interleaved, zbv and dualpipev "
        "give each rank two stages; the last two need --zero 1.",
    )
    dp_replicate: Ranks = Field(
        1,
        description="Hybrid sharding: groups of data-parallel ranks that hold the same shards, and "
        "sum their gradients once a step; 1 turns it off.",
    )
    zero: Annotated[Literal[3, 2, 1, 0], BeforeValidator(whole)] = Field(
        3,
        description="What data-parallel ranks shard. 3: parameters, gradients, optimizer "
        "state. 2: as 3, but gathered parameters stay until the backward. 1: optimizer state; "
        "parameters and gradients are whole within a step, which communicates once. 0: nothing.",
    )
    sequence_parallel: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Cut the activations between tensor-parallel regions along the sequence. auto: "
        "on with NCCL where tp divides the sequence, off with gloo (one all-reduce is cheaper).",
    )
    print_plan: bool = Field(
        False, description="Print parameters, placements, bytes and collectives, then exit."
    )
    world_size: Ranks | None = Field(
        None,
        description="With --print-plan: the number of processes to plan for; none: the real one.",
    )


class MemorySection(Section):
    """What is kept in memory, and what is computed or gathered again."""

    # Of runs that were begun when there was such a mode.
    _older = pydantic.model_validator(mode="before")(older_checkpointing)

    activation_checkpoint: Checkpointing = Field(
        "none",
        description="Blocks that keep their input alone, and compute their forward again in the "
        "backward. full: all; every-N, as every-2: one in N; none: no block.",
    )
    cpu_offload: bool = Field(
        False,
        description="Keep parameters, gradients and optimizer state in host memory and update "
        "them there; a GPU holds what it computes with. Has not been run on a GPU.",
    )
    compile: bool = Field(
        False,
        description="Compile each block with torch.compile: the first step takes longer, the "
        "others less; needs a C++ compiler.",
    )
    loss_chunks: Tokens = Field(
        1,
        description="Parts of a sequence whose logits exist at a time; 1: those of all of it.",
    )
    prefetch: NonNegativeInt | None = Field(
        None,
        description="Blocks whose parameters are gathered ahead of their use, forward and "
        "backward; none: as FSDP2 does by itself.",
    )
    grad_compression: Literal["none", "bf16", "fp16", "powersgd"] = Field(
        "none",
        description="Send gradients with fewer bytes, and lose digits: in 16 bits, or as factors "
        "of rank 32 (powersgd). For data parallelism alone, with --zero 0; one process sends "
        "nothing, and loses nothing. none sends them whole.",
    )


class ModelSection(LlamaConfig, Section):
    """What is trained: the fields of Hugging Face's config.json."""


class StepSection(Section):
    """One optimizer step."""

    # Of runs that were begun when it had that name.
    _older = pydantic.model_validator(mode="before")(older_batch_size)

    global_batch_size: Sequences = Field(
        8, description="Sequences per optimizer step, over all ranks and micro-batches."
    )
    micro_batch_size: Annotated[Sequences | None, tyro.conf.arg(aliases=("--batch-size",))] = Field(
        None,
        description="Sequences per dp rank per micro-batch; none: all of its share at once, or "
        "with --pp the most that leave 2 pp micro-batches.",
    )
    seq_len: Tokens = Field(256, description="Tokens per sequence.")
    steps: Steps = Field(120, description="Optimizer steps of the whole run.")
    seed: Seed = Field(0, description="Seed of the initial weights and the sample order.")
    dtype: Literal["bfloat16", "float32", "float64"] = Field(
        "float32",
        description="Compute dtype. Parameters and optimizer state are float32 (float64 with "
        "float64); for the state see --optimizer-state-dtype.",
    )


class OptimizerSection(Section):
    """How the weights are updated."""

    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="SGD is without momentum.")
    lr: PositiveFloat = Field(3e-3, description="Peak learning rate.")
    warmup_steps: NonNegativeInt = Field(10, description="Steps of linear warm-up; 0 turns it off.")
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine",
        description="Shape after the warm-up. wsd stays at the peak, then falls linearly over the "
        "last fifth of the decay steps.",
    )
    lr_decay_steps: Steps | None = Field(
        None,
        description="Step at which the minimum is reached and kept; none: --steps of the first "
        "start.",
    )
    min_lr_ratio: Fraction = Field(0.1, description="Minimum learning rate as a part of the peak.")
    weight_decay: NonNegativeFloat = Field(
        0.1, description="Decoupled decay of matrices (norm weights have none); 0 turns it off."
    )
    beta1: Beta = Field(0.9, description="AdamW's decay rate of the first moment.")
    beta2: Beta = Field(0.95, description="AdamW's decay rate of the second moment.")
    optimizer_state_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Stored dtype of AdamW's two moments. bfloat16 halves them and is lossy: they "
        "are rounded after each update, which is computed in float32. float32 is float64 with "
        "--dtype float64.",
    )
    grad_clip: NonNegativeFloat = Field(
        1.0, description="Largest global gradient norm; 0 turns it off."
    )


class DataSection(Section):
    """Text, tokens and evaluation."""

    dataset: Place = Field(
        "stdlib",
        description="stdlib (Python's own sources on this machine), a .txt, .jsonl (both also "
        ".gz or .zst) or .parquet file, a folder or glob of them, a Hugging Face dataset name, or "
        "synthetic.",
    )
    dataset_config: Text | None = Field(
        None, description="Configuration of a Hugging Face dataset."
    )
    dataset_split: Text = Field(
        "train",
        description="Split of a Hugging Face dataset, or of files whose names speak of splits.",
    )
    text_column: Text = Field(
        "text", description="Field of a .jsonl, .parquet or hub record with the text."
    )
    tokenizer: Place = Field(
        "bytes",
        description="bytes (built in, 257 tokens), a folder with tokenizer.json, that file, or a "
        "hub name.",
    )
    skip_bad_records: bool = Field(
        False,
        description="Skip and count unreadable or empty records; otherwise the first one stops "
        "the run.",
    )
    eval_every: NonNegativeInt = Field(
        50, description="Steps between evaluations on the held-out documents; 0 turns them off."
    )
    eval_batches: NonNegativeInt = Field(
        0, description="Global batches per evaluation; 0: every held-out sequence."
    )
    eval_fraction: Annotated[float, Field(ge=0, le=0.5)] = Field(
        0.01,
        description="Part of the documents that is held out, chosen by their content; 0: none.",
    )


class RunSection(Section):
    """The run directory and what is written there."""

    run_dir: CleanPath | None = Field(
        None,
        description="Run directory; none: runs/<recipe>. Without --recipe, the config.toml in it "
        "is the recipe.",
    )
    resume: Text | None = Field(
        None,
        description="The checkpoint to start from, as step-200; later ones are put aside. none: "
        "the newest whole one, as for any restart by torchrun or Slurm.",
    )
    checkpoint_every: NonNegativeInt = Field(
        50, description="Steps between checkpoints; 0: only one at the end."
    )
    keep_checkpoints: NonNegativeInt = Field(
        2,
        description="Newest complete checkpoints that are kept, besides the one started from; "
        "0: all of them.",
    )
    async_checkpoint: bool = Field(
        True,
        description="Write checkpoints while the training goes on, from a copy in host memory.",
    )
    stop_after: Duration | None = Field(
        None,
        description="Save and stop this long after the start, as 3h50m; none: no limit.",
    )
    comm_timeout: Timeout = Field(
        600.0,
        description="Seconds without progress until the run ends with an error that names the "
        "stuck rank; from 1 to 2592000 (30 days).",
    )
    log_every: Steps = Field(10, description="Steps between logged steps.")
    fingerprint_steps: NonNegativeInt = Field(
        0,
        description="First steps whose tokens, weights, activations, gradients are fingerprinted "
        "for recipes.compare_layouts; 0 turns it off.",
    )
    profile: StepRange | None = Field(
        None,
        description="Steps that every rank records, as 10-12: a Chrome trace, and on CUDA a memory "
        "snapshot, in profile/ of the run directory; none: no steps.",
    )
    calibration: CleanPath | None = Field(
        None,
        description="Constants of this machine, as recipes.plan --calibrate writes them, for the "
        "step time that is planned; none: those of the table of GPUs, where it knows this one.",
    )
    wandb: Literal["auto", "online", "offline", "disabled"] = Field(
        "auto",
        description="auto: as WANDB_MODE says, else online where an API key is configured, else "
        "offline. Never prompts.",
    )
    wandb_project: Text | None = Field(
        None, description="wandb project; none: WANDB_PROJECT, else parallel-recipes."
    )
    wandb_name: Text | None = Field(
        None, description="Name of the run on wandb; none: WANDB_NAME, else one of wandb's."
    )
    wandb_group: Text | None = Field(
        None, description="Group of the run on wandb; none: WANDB_RUN_GROUP, else no group."
    )
    wandb_tags: list[Text] | None = Field(
        None, description="Tags of the run on wandb; none: WANDB_TAGS, else no tags."
    )


class Config(Section):
    """A whole run."""

    recipe: Place = Field(
        "debug", description="A recipe of recipes/ by name, or the path of a TOML file."
    )
    config_json: Annotated[CleanPath | None, tyro.conf.arg(name="model-config")] = Field(
        None,
        exclude=True,
        description="A Hugging Face config.json (or its directory) with the model's dimensions; "
        "none: the recipe's.",
    )
    init_from: CleanPath | None = Field(
        None,
        exclude=True,
        description="A directory with a Hugging Face Llama (config.json, safetensors, and its "
        "tokenizer if there is one) to start from; none: random weights.",
    )
    layout: LayoutSection = Field(default_factory=LayoutSection)
    memory: MemorySection = Field(default_factory=MemorySection)
    model: ModelSection = Field(default_factory=ModelSection)
    step: StepSection = Field(default_factory=StepSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    data: DataSection = Field(default_factory=DataSection)
    run: RunSection = Field(default_factory=RunSection)

    # Whether the command line states --warmup-steps, which a few --steps then contradict.
    _warmup_given: bool = PrivateAttr(False)

    @property
    def warmup_given(self) -> bool:
        """Whether ``--warmup-steps`` is of the command line, and not of the recipe."""
        return self._warmup_given

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.run.run_dir or Path("runs") / Path(self.recipe).stem


def flag(*location: str | int) -> str:
    """The command-line flag of a field, from its place in the schema."""
    names = [str(part) for part in location if isinstance(part, str)]
    return "--" + (names[-1] if names else "").replace("_", "-")


def _nested(schema: type[BaseModel], key: str | int) -> type[BaseModel] | None:
    """The model behind a field, also where the field may be None; None for a plain value."""
    field = schema.model_fields.get(str(key))
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def unknown_key(schema: type[BaseModel], location: tuple[str | int, ...]) -> str:
    """What is said of a key that ``schema`` has not."""
    key = str(location[-1])
    for part in location[:-1]:
        schema = _nested(schema, part) or schema
    if instead := {"config_json": "--model-config", "init_from": "--init-from"}.get(key):
        return f"unknown key {key!r}: use {instead}"
    fields = getattr(schema, "model_fields", {})
    names = [name for name, field in fields.items() if not field.exclude]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    name, hint = key.replace("-", "_"), f"known keys: {', '.join(names)}"
    tables = {table: nested for table in Config.model_fields if (nested := _nested(Config, table))}
    table = next((table for table, nested in tables.items() if name in nested.model_fields), None)
    if table and name not in names and schema in (Config, *tables.values()):
        hint = f"it belongs to table [{table}]"
    elif near:
        hint = f"did you mean {near[0]!r}?"
    return f"unknown key {'.'.join(map(str, location))!r}: {hint}"


def _one_line(error: ValidationError, schema: type[BaseModel]) -> str:
    """The first fault of a validation as one line; an unknown key names the nearest known one."""
    fault = error.errors()[0]
    location = fault["loc"]
    if fault["type"] == "extra_forbidden":
        return unknown_key(schema, location)
    message = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if fault["type"] != "value_error":
        message = f"{message}, not {_shown(fault['input'])}"
    if not location:
        return message
    if nested := _nested(schema, location[0]):
        if len(location) == 1 and nested is not RopeScaling:
            return f"table [{location[0]}] must hold keys, not {_shown(fault['input'])}"
        # The fields of a nested value are no flags; the value is one.
        inner = ".".join(map(str, location[1:]))
        return f"{flag(location[0])} {inner + ': ' if inner else ''}{message}"
    return f"{flag(*location)} {message}"
