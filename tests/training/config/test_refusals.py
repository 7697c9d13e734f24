"""Bad input ends in one line with the flag, the numbers and the fix, before torch is imported."""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import ConfigError, LayoutError
from parallel.launch import Launch, read_launch
from tests import composition
from tests.conftest import OUTSIDE
from training import start as checks
from training.config.command_line import parse_flags
from training.config.schema import Config

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("no_launcher")
FLAGS = {
    "--" + name.replace("_", "-")
    for section in Config.model_fields.values()
    for name in getattr(section.annotation, "model_fields", {})
} | {"--recipe", "--model-config", "--init-from"}


def world(n: int, **extra: str | None) -> dict[str, str]:
    """torchrun's variables for rank 0 of n processes on one node; None removes one."""
    names = {"RANK": "0", "WORLD_SIZE": n, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": n}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **extra}
    return {name: str(value) for name, value in names.items() if value is not None}


SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SRUN["SLURM_STEP_TASKS_PER_NODE"] = "2"


def load(argv: list[str]):
    """What every start does before it imports torch."""
    launch = read_launch()
    config = parse_flags(argv)
    return config, checks.check(config, launch), launch


def refusal(monkeypatch, argv: str, environ: dict | None = None) -> str:
    """The one line that refuses a command; each flag that it names exists."""
    for name, value in (environ or {}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises((ConfigError, LayoutError)) as caught:
        load(argv.split())
    message = str(caught.value)
    assert message and "\n" not in message
    named = re.findall(r"--[a-z][a-z0-9-]+", message.replace("--no-", "--"))
    assert set(named) <= FLAGS, message
    return message


def assert_has(message: str, *fragments: str) -> None:
    # Bounded by non-digits, so that "4" is not found in "48".
    missing = [f for f in fragments if not re.search(rf"(?<!\w){re.escape(f)}(?!\w)", message)]
    assert not missing, f"{missing} not in {message!r}"


def test_the_table_of_what_composes_is_in_the_docs():
    text = (ROOT / "docs/parallelism.md").read_text()
    assert "\n".join(composition.table()) in text
    # The schedule that the table leaves out is refused and taken with the same.
    zbv, other = (composition.refusals_of(name) for name in ("zbv", "dualpipev"))
    assert zbv == [why and why.replace("dualpipev", "zbv") for why in other]


# What is said, of which values, of which flags.
RULES = [
    (
        "greater than 0",
        "0 -1",
        "--steps --global-batch-size --micro-batch-size --seq-len --log-every",
    ),
    (
        "greater than 0",
        "0 -1",
        "--tp --cp --pp --dp-replicate --world-size --lr-decay-steps --num-hidden-layers --lr",
    ),
    ("greater than 0", "0 -1", "--loss-chunks"),
    ("greater than 0", "0 -1", "--vocab-size --comm-timeout --hidden-size --rope-theta"),
    (
        "greater than or equal to 0",
        "-1",
        "--prefetch --eval-every --checkpoint-every --keep-checkpoints",
    ),
    ("greater than or equal to 0", "-1", "--eval-batches --warmup-steps --seed --weight-decay"),
    ("greater than or equal to 0", "-1", "--grad-clip --beta1 --eval-fraction --min-lr-ratio"),
    ("finite", "nan inf", "--lr --weight-decay --grad-clip --comm-timeout"),
    ("finite|equal to", "nan 1.1", "--min-lr-ratio --eval-fraction"),
    ("less than 1", "1.0", "--beta1 --beta2"),
    ("equal to 0.5", "0.6", "--eval-fraction"),
]
RANGES = [(f, v, rule) for rule, values, fs in RULES for f in fs.split() for v in values.split()]


@pytest.mark.parametrize("flag, value, rule", RANGES)
def test_range(monkeypatch, flag, value, rule):
    message = refusal(monkeypatch, f"{flag} {value}")
    assert message.startswith(f"{flag} must be ") and re.search(rule, message)
    assert float(message.rpartition("not ")[2]) == pytest.approx(float(value), nan_ok=True)


ZEROS = "--eval-every --checkpoint-every --keep-checkpoints --eval-batches --warmup-steps"


@pytest.mark.parametrize(
    "flag", [*ZEROS.split(), "--weight-decay", "--grad-clip", "--eval-fraction"]
)
def test_a_zero_that_is_accepted_is_documented(flag):
    config, _, _ = load([flag, "0"])
    name = flag[2:].replace("-", "_")
    section = next(s for _, s in config if name in getattr(type(s), "model_fields", {}))
    assert getattr(section, name) == 0
    assert re.search(r"\b0:? \w+", type(section).model_fields[name].description)


H12 = "--hidden-size 96 --num-attention-heads 12"
ROWS = {
    "vocab-uneven-over-tp-and-dp": (
        "--tp 2 --vocab-size 257 --global-batch-size 6",
        world(6),
        ["--vocab-size 257", "--tp 2", "--hidden-size 256", "dp 3", "--vocab-size 258"],
    ),
    "tp-processes": ("--tp 2", world(3), ["--tp 2", "3 processes", "--tp 1 or 3"]),
    "tp-one-process": ("--tp 4", {}, ["--tp 4", "1 processes", "multiple of 4"]),
    "heads": (
        "--tp 4 --num-attention-heads 6 --num-key-value-heads 6 --hidden-size 96",
        world(4),
        ["--tp 4", "--num-attention-heads 6", "--tp 1, 2, 3 or 6"],
    ),
    "kv-3-tp-2": (
        f"--tp 2 {H12} --num-key-value-heads 3",
        world(2),
        ["--tp 2", "--num-key-value-heads 3", "multiple"],
    ),
    "kv-6-tp-4": (
        f"--tp 4 {H12} --num-key-value-heads 6",
        world(4),
        ["--tp 4", "--num-key-value-heads 6", "multiple"],
    ),
    "ffn": (
        "--tp 2 --intermediate-size 63",
        world(2),
        ["--tp 2", "--intermediate-size 63", "--intermediate-size 64"],
    ),
    "sequence": (
        "--tp 2 --seq-len 15 --sequence-parallel on",
        world(2),
        ["--tp 2", "--seq-len 15", "--seq-len 16", "--sequence-parallel off"],
    ),
    # ceil(9/4) = 3 rows each are used up by three ranks.
    "vocab-rank-empty": (
        "--tp 4 --vocab-size 9",
        world(4),
        ["--vocab-size 9", "--tp 4", "--vocab-size 12"],
    ),
    "vocab-below-tp": ("--tp 8 --vocab-size 7", world(8), ["--vocab-size 7", "--tp 8"]),
    "global-batch": (
        "--global-batch-size 6",
        world(4),
        ["--global-batch-size 6", "4 data-parallel", "8", "--tp"],
    ),
    "global-batch-with-tp": (
        "--global-batch-size 7 --tp 2",
        world(6),
        ["--global-batch-size 7", "3 data-parallel", "9"],
    ),
    "batch": (
        "--micro-batch-size 3",
        world(2),
        ["--micro-batch-size 3", "4 sequences", "--global-batch-size 8", "dp 2", "1, 2 or 4"],
    ),
    "replicas": (
        "--dp-replicate 3 --tp 2",
        world(8),
        ["--dp-replicate 3", "4 data-parallel ranks", "8 processes", "--tp 2", "1, 2 or 4"],
    ),
    "context": (
        "--cp 3 --tp 2",
        world(8),
        ["--cp 3", "4 ranks", "8 processes", "--tp 2", "1, 2 or 4"],
    ),
    "context-sequence": (
        "--cp 2 --seq-len 30",
        world(4),
        ["--cp 2", "--seq-len 30", "4 chunks", "--seq-len 32"],
    ),
    "context-sequence-parallel": (
        "--cp 2 --tp 4 --seq-len 36 --sequence-parallel on",
        world(8),
        ["--tp 4", "18 tokens", "--seq-len 36", "--cp 2", "--seq-len 40"],
    ),
    "pipeline": (
        "--pp 3 --tp 2",
        world(8),
        ["--pp 3", "4 ranks", "8 processes", "--tp 2", "--pp 1, 2 or 4"],
    ),
    "pipeline-tied": (
        "--pp 2 --tie-word-embeddings",
        world(2),
        ["--pp 2", "--tie-word-embeddings", "--no-tie-word-embeddings", "--pp 1"],
    ),
    "pipeline-layers": (
        "--pp 2 --pp-schedule interleaved --num-hidden-layers 3",
        world(2),
        ["--pp 2", "interleaved", "4 stages", "--num-hidden-layers 3", "--pp-schedule 1f1b"],
    ),
    "pipeline-micro-batches": (
        "--pp 2 --micro-batch-size 8",
        world(2),
        [
            "--pp 2",
            "1f1b",
            "at least 2",
            "--micro-batch-size 8",
            "1 of the 8",
            "--micro-batch-size 4",
        ],
    ),
    "pipeline-batch": (
        "--pp 4 --global-batch-size 4",
        world(8),
        ["--pp 4", "at least 4", "2 sequences", "--global-batch-size 4 / dp 2", "batch-size 8"],
    ),
    "pipeline-rounds": (
        "--pp 2 --pp-schedule interleaved --global-batch-size 6 --micro-batch-size 2",
        world(2),
        [
            "--pp 2",
            "interleaved",
            "a multiple of 2",
            "--micro-batch-size 2",
            "3 of",
            "--micro-batch-size 3",
        ],
    ),
    "pipeline-zero": (
        "--pp 2 --pp-schedule zbv",
        world(2),
        ["--pp-schedule zbv", "--zero 3", "--zero 1"],
    ),
    "pipeline-recompute": (
        "--pp 2 --pp-schedule dualpipev --zero 1 --activation-checkpoint full",
        world(2),
        ["--pp-schedule dualpipev", "--activation-checkpoint full", "1f1b"],
    ),
    "pipeline-compile": (
        "--pp 2 --pp-schedule zbv --zero 1 --compile",
        world(2),
        ["--pp-schedule zbv", "--compile", "--no-compile", "1f1b"],
    ),
    "replicas-of-replicas": (
        "--dp-replicate 2 --zero 0",
        world(4),
        ["--dp-replicate 2", "--zero 0", "all 4", "leave it out"],
    ),
    "compression-tp": (
        "--grad-compression bf16 --tp 2 --zero 0",
        world(4),
        ["--grad-compression bf16", "--tp 2", "--tp 1", "--grad-compression none"],
    ),
    "compression-pp": (
        "--grad-compression bf16 --pp 2 --zero 0",
        world(4),
        ["--grad-compression bf16", "--pp 2", "--pp 1"],
    ),
    "compression-cp": (
        "--grad-compression fp16 --cp 2 --zero 0",
        world(4),
        ["--grad-compression fp16", "--cp 2", "--cp 1"],
    ),
    "compression-replicas": (
        "--grad-compression powersgd --dp-replicate 2",
        world(4),
        ["--grad-compression powersgd", "--dp-replicate 2", "--dp-replicate 1"],
    ),
    "compression-shards": (
        "--grad-compression bf16",
        world(4),
        ["--grad-compression bf16", "--zero 3", "--zero 0"],
    ),
    "compression-prefetch": (
        "--grad-compression bf16 --zero 0 --prefetch 2",
        world(4),
        ["--prefetch 2", "--grad-compression bf16", "leave it out"],
    ),
    "compression-offload": (
        "--grad-compression bf16 --zero 0 --cpu-offload",
        world(4),
        ["--cpu-offload", "--grad-compression bf16", "leave it out"],
    ),
    "compression-small": (
        "--grad-compression powersgd --zero 0 --hidden-size 64 --intermediate-size 64",
        world(4),
        ["--grad-compression powersgd", "rank 32", "--hidden-size 64", "--grad-compression bf16"],
    ),
    "warmup-steps": (
        "--warmup-steps 20 --steps 10",
        {},
        ["--warmup-steps 20", "10 steps", "--lr-decay-steps", "--steps", "fewer warm-up"],
    ),
    "warmup-decay": (
        "--warmup-steps 20 --steps 100 --lr-decay-steps 10",
        {},
        ["--warmup-steps 20", "10 steps", "--lr-decay-steps"],
    ),
    "state-sgd": (
        "--optimizer sgd --optimizer-state-dtype bfloat16",
        {},
        ["--optimizer-state-dtype bfloat16", "--optimizer sgd", "leave it out"],
    ),
    "state-beta1": (
        "--beta1 0.995 --optimizer-state-dtype bfloat16",
        {},
        ["--beta1 0.995", "--optimizer-state-dtype bfloat16", "--beta1 0.99", "float32"],
    ),
    "state-beta2": (
        "--beta2 0.999 --optimizer-state-dtype bfloat16",
        {},
        ["--beta2 0.999", "--optimizer-state-dtype bfloat16", "--beta2 0.99", "float32"],
    ),
    "timeout-long": ("--comm-timeout 1e300", {}, ["--comm-timeout", "30 days", "1e+300"]),
    "timeout-short": ("--comm-timeout 1e-9", {}, ["--comm-timeout", "1 to 2592000", "1e-09"]),
    "name-long": (f"--run-dir {'a' * 300}", {}, ["--run-dir", "300 bytes", "255"]),
    "path-long": (f"--tokenizer {'a/' * 2000}", {}, ["--tokenizer", "4000 bytes", "3500"]),
    "path-empty": ("--run-dir=", {}, ["--run-dir must not be empty"]),
    "recipe-empty": ("--recipe=", {}, ["--recipe must not be empty"]),
    "nobody": ("--run-dir ~no-such-user/x", {}, ["--run-dir", "home directory"]),
    "not-text": ("--dataset \udcff", {}, ["argument 2", "UTF-8"]),
    "control": ("--recipe \x1b[31m", {}, [r"--recipe \x1b[31m"]),
    "vocab-large": ("--vocab-size 99999999999", {}, ["--vocab-size 99999999999", "134217728"]),
    "layers": ("--num-hidden-layers 10000000", {}, ["--num-hidden-layers 10000000", "2000"]),
    "batch-large": ("--global-batch-size 1000000000000", {}, ["--global-batch-size", "16777216"]),
    "seed-large": (f"--seed {2**70}", {}, ["--seed", str(2**63), str(2**70)]),
    "steps-large": (f"--steps {10**20}", {}, ["--steps", str(10**20)]),
    "tokens": (
        f"--steps {10**12} --global-batch-size 1000000 --seq-len 100000",
        {},
        [f"--steps {10**12}", "--seq-len 100000", "64 bits"],
    ),
    "duration": ("--stop-after 99999999999d", {}, ["--stop-after", "365d"]),
    "profile-large": ("--profile 1-99999999999999", {}, ["--profile", "10-12"]),
    "wandb-mode": ("", {"WANDB_MODE": "of"}, ["WANDB_MODE=of", "online, offline or disabled"]),
    "wandb-mode-online": ("", {"WANDB_MODE": "online"}, ["WANDB_MODE=online", "--wandb offline"]),
    "world-size": ("--world-size 8", {}, ["--world-size 8", "--print-plan", "torchrun"]),
    "plan-tp": (
        "--world-size 6 --print-plan --tp 4",
        {},
        ["--tp 4", "6 processes", "1, 2, 3 or 6"],
    ),
    "head-dim": ("--head-dim 7", {}, ["--head-dim 7", "odd", "even"]),
    "head-dim-derived": ("--hidden-size 240", {}, ["--head-dim 15", "even"]),
    "hidden": (
        "--hidden-size 250",
        {},
        ["--num-attention-heads 16", "--hidden-size 250", "--head-dim"],
    ),
    "kv-divides": (
        "--num-key-value-heads 5",
        {},
        ["--num-key-value-heads 5", "--num-attention-heads 16"],
    ),
    "kv-above-heads": ("--num-key-value-heads 32", {}, ["--num-key-value-heads 32", "16"]),
    "wandb": (
        "--wandb online",
        {},
        ["--wandb online", "key", "WANDB_API_KEY", "wandb login", "--wandb offline"],
    ),
    "recipe": ("--recipe debgu", {}, ["--recipe debgu", "did you mean debug"]),
    "recipe-far": ("--recipe zzz", {}, ["--recipe zzz", "debug", ".toml"]),
    "recipe-file": ("--recipe nope.toml", {}, ["--recipe nope.toml", "debug"]),
    "model-config": ("--model-config nope", {}, ["--model-config nope", "No such file"]),
    "rank-only": ("", world(2, WORLD_SIZE=None), ["RANK=0", "WORLD_SIZE=None", "torchrun"]),
    "world-only": ("", world(2, RANK=None), ["RANK=None", "WORLD_SIZE=2", "torchrun"]),
    "rank-text": ("", world(2, RANK="a"), ["RANK=a", "WORLD_SIZE=2"]),
    "rank-outside": ("", world(4, RANK="4"), ["RANK=4", "WORLD_SIZE=4"]),
    "rank-negative": ("", world(4, RANK="-1"), ["RANK=-1", "WORLD_SIZE=4"]),
    "world-0": ("", world(0), ["RANK=0", "WORLD_SIZE=0"]),
    "local-outside": (
        "",
        world(4, RANK="3", LOCAL_RANK="3", LOCAL_WORLD_SIZE="2"),
        ["LOCAL_RANK=3", "LOCAL_WORLD_SIZE=2"],
    ),
    "local-world-above-world": (
        "",
        world(4, LOCAL_WORLD_SIZE="8"),
        ["LOCAL_WORLD_SIZE=8", "WORLD_SIZE=4"],
    ),
    "no-address": ("", world(2, MASTER_ADDR=None), ["MASTER_ADDR", "torchrun"]),
    "slurm-incomplete": (
        "",
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
        ["SLURM_STEP_NUM_TASKS=4", "SLURM_PROCID=0", "SLURM_LOCALID=None", "srun"],
    ),
    "slurm-outside": (
        "",
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "4"}
        | {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
        ["SLURM_PROCID=4", "SLURM_STEP_NUM_TASKS=4"],
    ),
    "port-text": ("", world(2, MASTER_PORT="xx"), ["MASTER_PORT=xx", "1 to 65535", "torchrun"]),
    "port-0": ("", world(2, MASTER_PORT="0"), ["MASTER_PORT=0 is"]),
    "port-large": ("", world(2, MASTER_PORT="99999"), ["MASTER_PORT=99999 is"]),
    "port-negative": ("", world(2, MASTER_PORT="-1"), ["MASTER_PORT=-1 is"]),
    "slurm-job": ("", SRUN | {"SLURM_JOB_ID": "abc"}, ["SLURM_JOB_ID=abc", "srun"]),
    "slurm-step": ("", SRUN | {"SLURM_STEP_ID": "\x1b[1m"}, ["SLURM_STEP_ID="]),
    "slurm-text": ("", {"SLURM_STEP_NUM_TASKS": "x"}, ["SLURM_STEP_NUM_TASKS=x"]),
}


@pytest.mark.parametrize("argv, environ, fragments", ROWS.values(), ids=ROWS)
def test_refusal(monkeypatch, argv, environ, fragments):
    assert_has(refusal(monkeypatch, argv, environ), *fragments)


SCALING = "factor = 8\nlow_freq_factor = 1\nhigh_freq_factor = 4\n"
ORIGINAL = "original_max_position_embeddings = 64\n"
RECIPES = {
    "key": ("[optimizer]\nlrr = 1e-3", ["lrr", "did you mean 'lr'"]),
    "key-hyphen": ("[optimizer]\nwarmup-steps = 3", ["did you mean 'warmup_steps'"]),
    "key-far": ("[layout]\nxyzzy = 3", ["xyzzy", "tp", "zero"]),
    "table": ("[optim]\nlr = 1e-3", ["optim", "did you mean 'optimizer'"]),
    "table-is-number": ("step = 3", ["step", "3"]),
    "type": ("[step]\nsteps = 'many'", ["--steps", "integer", "'many'"]),
    "fraction": ("[step]\nsteps = 2.5", ["--steps", "integer", "2.5"]),
    "choice": ("[layout]\nzero = 7", ["--zero", "3", "2", "7"]),
    "range": ("[data]\neval_fraction = 0.9", ["--eval-fraction", "0.5", "0.9"]),
    "scaling-key": (
        f"[model.rope_scaling]\n{SCALING}{ORIGINAL}factr = 1",
        ["factr", "did you mean 'factor'"],
    ),
    "scaling-missing": (f"[model.rope_scaling]\n{SCALING}", ["--rope-scaling"]),
    "scaling-type": (
        f"[model.rope_scaling]\nrope_type = 'yarn'\n{SCALING}{ORIGINAL}",
        ["--rope-scaling", "llama3", "yarn"],
    ),
    "syntax": ("[step\nsteps = 3", ["line 1"]),
    "encoding": (b"[step]\nsteps = 3 # \xff\n", ["utf-8"]),
    "text-for-int": ("[model]\n# x\nhidden_size = '128'", ["line 3, [model] hidden_size", "'128'"]),
    "text-for-float": ("\n[optimizer]\nlr = '1e-3'", ["line 3, [optimizer] lr", "'1e-3'"]),
    "text-for-bool": ("[model]\ntie_word_embeddings = 'yes'", ["line 2", "boolean", "'yes'"]),
    "bool-for-int": ("[model]\nnum_hidden_layers = true", ["line 2", "integer", "True"]),
    "bool-for-choice": ("[layout]\nzero = true", ["line 2, [layout] zero", "whole number", "True"]),
    "float-for-int": ("[step]\nsteps = 1.0", ["line 2, [step] steps", "integer", "1.0"]),
    "dotted": ("step.steps = '3'", ["line 1, [step] steps", "'3'"]),
    "inline": ("step = {seed = 1, steps = '3'}", ["line 1, [step] steps", "'3'"]),
    "date": (
        "[optimizer]\nlr = 2026-01-01",
        ["line 2, [optimizer] lr", "datetime.date(2026, 1, 1)"],
    ),
    "scaling-text": (
        f"[model.rope_scaling]\n{ORIGINAL}factor = '8'",
        ["line 3, [model.rope_scaling] factor", "'8'"],
    ),
    "other-table": ("[step]\nlr = 1e-3", ["line 2", "'lr'", "belongs to table [optimizer]"]),
    "no-table": ("warmup-steps = 3", ["line 1", "'warmup-steps'", "belongs to table [optimizer]"]),
    "excluded": ("cofig_json = 'x'", ["known keys: recipe, layout, memory"]),
    "nested": ("x = " + "[" * 5000, ["nested too deeply"]),
    "utf-16": ("[step]\nsteps = 3\n".encode("utf-16"), ["utf-8"]),
    "password": (
        "[data]\ndataset = 'https://u:pw@h/x'",
        ["line 2, [data] dataset", "environment"],
    ),
    # The fields behind --model-config and --init-from are no keys: they would be read by nobody.
    "config-json": ("config_json = 'config.json'", ["config_json", "--model-config"]),
    "init-from": ("init_from = 'hf'", ["init_from", "--init-from"]),
}


@pytest.mark.parametrize("text, fragments", RECIPES.values(), ids=RECIPES)
def test_recipe_refusal(monkeypatch, tmp_path, text, fragments):
    (tmp_path / "bad.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_has(refusal(monkeypatch, "--recipe bad.toml"), "--recipe bad.toml", *fragments)


SECRETS = {
    "unknown flag": ["--wandb-api-key", "sk-very-secret"],
    "unknown flag with =": ["--hf_token=sk-very-secret"],
    "url": ["--wandb-project", "https://user:sk-very-secret@host/x"],
    "token in a url": ["--dataset=https://sk-very-secret@github.com/x.txt"],
    "bucket": ["--init-from", "s3://key:sk-very-secret@bucket/x"],
    "signed": ["--tokenizer", "https://host/x?se=1&sig=sk-very-secret"],
    "recipe": ["--recipe", "https://user:sk-very-secret@host/x.toml"],
}


@pytest.mark.parametrize("argv", SECRETS.values(), ids=SECRETS)
def test_a_secret_is_refused_and_not_repeated(argv):
    with pytest.raises(ConfigError) as caught:
        load(argv)
    message = str(caught.value)
    assert message.startswith(argv[0].partition("=")[0]) and "environment" in message
    assert "very-secret" not in message


@pytest.mark.parametrize("name", checks.RESTARTS)
def test_a_restart_count_that_is_none(monkeypatch, capsys, name):
    monkeypatch.setattr(checks.os, "_exit", sys.exit)
    monkeypatch.setenv(name, "x")
    with pytest.raises(SystemExit) as caught:
        checks.load_config([])
    assert caught.value.code == 2
    assert f"error: {name}=x is no number of restarts\n" in capsys.readouterr().err
    monkeypatch.setenv(name, "")
    checks.load_config([])


def rope(**fields) -> dict:
    return {"rope_scaling": fields}


MODEL_CONFIGS = {
    "two-missing": ({"hidden_size": None, "vocab_size": None}, ["hidden_size, vocab_size"]),
    "yarn": (rope(rope_type="yarn", factor=2), ["'yarn'", "'llama3'"]),
    "linear-old-key": (rope(type="linear", factor=2), ["'linear'", "'llama3'"]),
    "dynamic-new-block": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2}},
        ["'dynamic'", "'llama3'"],
    ),
    "llama3-incomplete": (rope(rope_type="llama3", factor=8), ["rope_scaling.low_freq_factor"]),
    "rope-not-a-table": ({"rope_scaling": [1]}, ["rope_scaling"]),
    "rope-text": ({"rope_scaling": "yarn"}, ["rope_scaling", "'yarn'"]),
    "other-model": ({"model_type": "qwen3"}, ["'qwen3'", "'llama'"]),
    "bias": ({"attention_bias": True}, ["attention_bias", "True", "False"]),
    "activation": ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
    "type": ({"hidden_size": "wide"}, ["hidden_size", "integer", "'wide'"]),
    "negative": ({"num_hidden_layers": -1}, ["num_hidden_layers", "0", "-1"]),
}
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 300}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("change, fragments", MODEL_CONFIGS.values(), ids=MODEL_CONFIGS)
def test_model_config_refusal(monkeypatch, tmp_path, change, fragments):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    message = refusal(monkeypatch, "--model-config config.json")
    # The file is at fault, also where one of its values is out of a flag's range.
    assert_has(message, "--model-config config.json", *fragments)


def test_run_dir_that_is_a_file(monkeypatch, tmp_path):
    (tmp_path / "taken").write_text("")
    assert_has(refusal(monkeypatch, "--run-dir taken"), "--run-dir taken", "file", "directory")
    message = refusal(monkeypatch, "--calibration taken")
    assert_has(message, "--calibration taken", "cannot be read", "measure it anew")


@pytest.mark.parametrize(
    "argv, n",
    [
        ("--tp 4 --num-key-value-heads 2", 4),  # kv heads are replicated
        ("--tp 2 --seq-len 15", 2),  # auto turns sequence parallel off
        ("--tp 4 --vocab-size 10", 4),  # uneven, but nobody is empty: 3, 3, 3, 1
        ("--warmup-steps 10 --steps 10", 1),
        ("--beta2 0.99 --optimizer-state-dtype bfloat16", 1),
        ("--beta2 0.999 --optimizer-state-dtype float32", 1),
        ("--world-size 64 --print-plan --tp 8", 1),
    ],
)
def test_what_is_near_a_refusal_is_accepted(monkeypatch, argv, n):
    for name, value in world(n).items():
        monkeypatch.setenv(name, value)
    load(argv.split())


def test_vocabulary_must_hold_the_tokenizer(tmp_path):
    from training.setup import resolve_vocabulary

    tokenizer = SimpleNamespace(vocab_size=64, name="tok")
    config, layout, _ = load(["--vocab-size", "60"])
    with pytest.raises(ConfigError) as caught:
        resolve_vocabulary(config, layout, tokenizer)
    assert_has(
        str(caught.value), "--vocab-size 60", "token 63", "--tokenizer tok", "--vocab-size 64"
    )
    for argv, size in (([], 64), (["--vocab-size", "64"], 64), (["--vocab-size", "99"], 99)):
        config, layout, _ = load(argv)
        resolve_vocabulary(config, layout, tokenizer)
        assert config.model.vocab_size == size


def test_vocabulary_of_the_tokenizer_leaves_a_rank_empty(monkeypatch):
    from training.setup import resolve_vocabulary

    for name, value in world(4).items():
        monkeypatch.setenv(name, value)
    config, layout, _ = load(["--tp", "4"])
    with pytest.raises(LayoutError) as caught:
        resolve_vocabulary(config, layout, SimpleNamespace(vocab_size=9, name="tok"))
    assert_has(str(caught.value), "--vocab-size 9", "--tp 4", "--vocab-size 12")


TYRO = {
    "type": ("--steps many", ["--steps", "'many'"]),
    "float": ("--lr fast", ["--lr", "'fast'"]),
    "fraction": ("--tp 1.5", ["--tp", "'1.5'"]),
    "choice": ("--zero 7", ["'7'", "--zero", "'3', '2', '1', '0'"]),
    "json": ("--rope-scaling {", ["--rope-scaling"]),
    "no-value": ("--steps", ["--steps"]),
    "unknown": ("--seqlen 3", ["--seqlen", "--seq-len"]),
    "unknown-far": ("--xyzzy 3", ["--xyzzy"]),
    "positional": ("debug", ["debug"]),
}


@pytest.mark.parametrize("argv, fragments", TYRO.values(), ids=TYRO)
def test_tyro_refusal(capsys, argv, fragments):
    for console in (False, True):
        with pytest.raises(ConfigError) as caught:
            parse_flags(argv.split(), console=console)
        assert capsys.readouterr() == ("", "")
    message = str(caught.value)
    assert "\n" not in message and "│" not in message
    assert_has(message, *fragments)


# The launcher's variables, where they are right.


def test_launch_is_torchruns_else_sruns_else_one_process():
    slurm = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    slurm["SLURM_STEP_TASKS_PER_NODE"] = "2(x2)"
    assert read_launch({}) == Launch(0, 1, 0, 1)
    assert read_launch(slurm) == Launch(3, 4, 1, 2)
    # An allocation is not a step, and one task may start torchrun.
    assert read_launch({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == Launch(0, 1, 0, 1)
    torchrun = world(8, RANK="5", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    assert read_launch(slurm | torchrun) == Launch(5, 8, 1, 4)


@pytest.mark.parametrize(
    "argv, environ, fragments",
    [
        ("", {"SLURM_NTASKS": "4"}, ["SLURM", "4 tasks", "srun", "torchrun"]),
        ("--tp 4", world(4, LOCAL_WORLD_SIZE="2"), ["--tp 4", "2 processes", "slow"]),
        ("--tp 2", world(4, LOCAL_WORLD_SIZE="2"), []),
        ("", {}, []),
        # The recipe's warm-up was not asked for.
        ("--steps 3", {}, ["10 steps", "ends at step 3", "--warmup-steps 0", "--steps"]),
        ("--steps 10", {}, []),
    ],
)
def test_warning(monkeypatch, capsys, argv, environ, fragments):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    checks.load_config(argv.split())
    err = capsys.readouterr().err
    assert err.count("\n") == err.count("warning") == bool(fragments)
    assert_has(err, *fragments)


@pytest.mark.parametrize(
    "launch, message, err",
    [
        (Launch(0, 8, 0, 4), "no", "train_llm.py: error: no\n"),
        (Launch(1, 8, 1, 4), "no", ""),
        # Nobody ended the first rank of another node: only there is something wrong.
        (Launch(4, 8, 0, 4), "no", r"train_llm.py: error: rank 4 on \S+: no\n"),
        (Launch(5, 8, 1, 4), "no", ""),
    ],
)
def test_who_speaks(monkeypatch, capsys, launch, message, err):
    slept, left = [], []
    monkeypatch.setattr(checks.time, "sleep", slept.append)
    monkeypatch.setattr(checks.os, "_exit", left.append)
    checks.refuse(message, launch)
    assert left == [2] and sum(slept) == (10 if launch.rank else 0)
    assert re.fullmatch(err, capsys.readouterr().err)


# Real processes.


def start(argv: list[str], cwd: Path, environ: dict | None = None, *paths: Path):
    """Run ``python ARGV`` in cwd without the session's launcher and wandb variables."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(OUTSIDE)} | (environ or {})
    env |= {"NETRC": str(cwd / "no-netrc"), "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=100
    )
    done.seconds = time.monotonic() - began
    return done


@pytest.fixture
def train(tmp_path):
    """Start train_llm.py where importing torch leaves a mark and fails."""
    stub, mark = tmp_path / "stub", tmp_path / "torch-imported"
    (stub / "torch").mkdir(parents=True)
    (stub / "torch" / "__init__.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nraise ImportError('stub')\n"
    )

    def run(argv: str, environ: dict | None = None):
        done = start([str(ROOT / "train_llm.py"), *argv.split()], tmp_path, environ, stub)
        done.imported_torch = mark.exists()
        return done

    return run


def test_the_stub_notices_an_import_of_torch(train):
    done = train("")
    assert done.imported_torch and done.returncode == 1 and "ImportError: stub" in done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_says_what_starts_before_it_imports_torch(train, rank):
    done = train("--tp 4", world(8) | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    what = (
        "recipe debug, layout 2x4 on 8 processes, run directory runs/debug; importing torch ...\n"
    )
    assert done.imported_torch and done.stdout == (what if rank == 0 else "")


PROCESSES = {
    "range": ("--steps 0", {}, ["--steps", "0"]),
    "layout": ("--tp 3", world(4), ["--tp 3", "4 processes", "1, 2 or 4"]),
    "recipe": ("--recipe debgu", {}, ["debug"]),
    "wandb": ("--wandb online", {}, ["WANDB_API_KEY"]),
    "variables": ("", {"RANK": "0"}, ["WORLD_SIZE=None"]),
    "file format": ("--dataset imagefolder", {}, ["--dataset imagefolder", "file format"]),
    "no effect": ("--dataset-split test", {}, ["--dataset-split test", "--dataset stdlib"]),
    "run-dir": ("--run-dir no-netrc", {}, ["--run-dir no-netrc", "file"]),
}


@pytest.mark.parametrize("argv, environ, fragments", PROCESSES.values(), ids=PROCESSES)
def test_process_is_refused(train, tmp_path, argv, environ, fragments):
    (tmp_path / "no-netrc").write_text("")
    done = train(argv, environ)
    assert done.returncode == 2 and done.stdout == "" and not done.imported_torch
    assert re.fullmatch(r"train_llm\.py: error: [^\n]+\n", done.stderr), done.stderr
    assert_has(done.stderr, *fragments)
    assert done.seconds < 5
    assert not (tmp_path / "runs").exists()


def test_process_with_an_unknown_flag_is_refused(train):
    done = train("--seqlen 3")
    assert done.returncode == 2 and done.stdout == "" and not done.imported_torch
    assert re.fullmatch(r"train_llm\.py: error: .*--seqlen.*--seq-len.*\n", done.stderr)
    assert done.seconds < 5


def test_unknown_dataset_is_refused(tmp_path):
    """With the real torch; names that only the hub can know are in test_data.py."""
    done = start([str(ROOT / "train_llm.py"), "--dataset", "missing.txt"], tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("train_llm.py: error: --dataset missing.txt")


def test_offloading_without_a_gpu_is_refused(tmp_path):
    """With the real torch, which alone can tell, and before it has a process group."""
    argv = [str(ROOT / "train_llm.py"), "--cpu-offload", "--dataset", "synthetic"]
    done = start(argv, tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2, done.stderr
    found = r"train_llm\.py: error: --cpu-offload on \S+, which has 0 GPUs: [^\n]+\n"
    assert re.fullmatch(found, done.stderr), done.stderr
    assert not (tmp_path / "runs").exists()


TORCHRUN = {
    "--steps=0": "train_llm.py: error: --steps must be greater than 0, not 0\n",
    "--seqlen=3": "train_llm.py: error: Unrecognized options: --seqlen",
    "--steps=many": "train_llm.py: error: Error parsing --steps",
}


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory):
    """Four processes for each refused flag, all at once to save time."""
    cwd = tmp_path_factory.mktemp("torchrun")
    # Rank 0 alone speaks, so it must come to that although it is the last.
    (cwd / "sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('RANK') == '0':\n    time.sleep(3)\n"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    with ThreadPoolExecutor() as pool:
        started = {
            flag: pool.submit(start, [*launcher, str(ROOT / "train_llm.py"), flag], cwd, {}, cwd)
            for flag in TORCHRUN
        }
    return {flag: future.result() for flag, future in started.items()}


@pytest.mark.parametrize("flag", TORCHRUN)
def test_torchrun_refuses_once(torchrun, flag):
    done = torchrun[flag]
    assert done.returncode != 0 and done.seconds < 40
    assert done.stderr.count(TORCHRUN[flag]) == 1, done.stderr
    # Our line, once, and not tyro's box.
    assert done.stderr.count("train_llm.py: error") == 1 and "╭" not in done.stderr
    # torchrun's own report may hold a traceback; none may go through our code.
    assert 'train_llm.py", line' not in done.stderr + done.stdout
