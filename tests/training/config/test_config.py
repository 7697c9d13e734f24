"""One schema: what wins over what, what a resume may change, and the learning rate."""

import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from common.errors import ConfigError
from common.secrets import is_secret, masked
from tests.runs import read_wandb
from training.checkpoint.folder import file_sum, write_sums
from training.checkpoint.resume import NOT_COMPARED, check_resume, identity
from training.config.command_line import RECIPES, Parser, load_recipe, parse_flags
from training.config.options import to_toml
from training.config.schema import Config, OptimizerSection, StepSection, flag
from training.config.values import seconds, step_range
from training.optimizers.schedule import lr_at
from training.run.directory import RunDir
from training.run.wandb_run import wandb_key_configured, wandb_mode
from training.start import launch_ids, load_config

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("no_launcher")


def train_llm(cwd: Path, *argv: str):
    """Run train_llm.py where an import of torch fails."""
    (cwd / "stub" / "torch").mkdir(parents=True)
    (cwd / "stub" / "torch" / "__init__.py").write_text("raise ImportError('stub')\n")
    env = os.environ | {"PYTHONPATH": str(cwd / "stub"), "COLUMNS": "80"}
    command = [sys.executable, str(ROOT / "train_llm.py"), *argv]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


# Precedence.

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 70}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 64}


def with_model_config(change: dict, *argv: str) -> Config:
    Path("hf").mkdir(exist_ok=True)
    Path("hf", "config.json").write_text(json.dumps(LLAMA | change))
    return parse_flags(["--model-config", "hf", *argv])


def test_flag_beats_model_config_beats_recipe(capsys):
    recipe = "[model]\nhidden_size = 96\nrms_norm_eps = 1e-3\nrope_theta = 7.0\n[step]\nsteps = 7\n"
    Path("mine.toml").write_text(recipe)
    argv = ("--recipe", "mine.toml", "--rope-theta", "9", "--seq-len=32")
    config = with_model_config({"rms_norm_eps": 1e-6, "rope_theta": 1e6}, *argv)
    assert config.model.rope_theta == 9.0  # flag over file over recipe
    assert (config.model.rms_norm_eps, config.model.hidden_size) == (1e-6, 64)  # file over recipe
    assert (config.step.steps, config.step.seq_len) == (7, 32)  # recipe, and flag over recipe
    assert parse_flags(list(argv)).model.hidden_size == 96
    overrides = [line for line in capsys.readouterr().err.splitlines() if "overrides" in line]
    assert overrides == ["--rope-theta 9.0 overrides 1000000.0 of --model-config"]


@pytest.mark.parametrize(
    "argv, said",
    [
        ([], ""),
        (["--rms-norm-eps", "1e-6"], ""),  # the file's own value
        (["--head-dim", "16"], "--head-dim 16 overrides 32"),
        (["--vocab-size", "300"], "--vocab-size 300 overrides 70"),
        (["--no-tie-word-embeddings"], "--tie-word-embeddings False overrides True"),
        (["--rope-scaling", "none"], "--rope-scaling None overrides {'rope_type': 'llama3'"),
    ],
)
def test_overrides_are_listed(capsys, argv, said):
    file = {"head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
    file |= {"num_key_value_heads": 4, "rope_theta": 1e4}  # so that nothing is assumed
    config = with_model_config(file | {"rope_scaling": {"rope_type": "llama3", **SCALING}}, *argv)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == bool(said)
    assert said in captured.err
    assert config.model.head_size == (16 if "--head-dim" in argv else 32)


def test_configuration_of_a_dataset_goes_with_it():
    assert parse_flags(["--recipe", "llama3_8b"]).data.dataset_config == "sample-10BT"
    same = ["--recipe", "llama3_8b", "--dataset", "HuggingFaceFW/fineweb-edu"]
    assert parse_flags(same).data.dataset_config == "sample-10BT"
    other = ["--recipe", "llama3_8b", "--dataset=synthetic"]
    assert parse_flags(other).data.dataset_config is None
    assert parse_flags([*other, "--dataset-config", "en"]).data.dataset_config == "en"


def test_what_the_file_leaves_out_is_not_the_recipes():
    """The debug recipe has 8 kv heads; a config.json without the key means as many as heads."""
    model = with_model_config({}).model
    assert model.kv_heads == 4 and model.num_key_value_heads is None
    # transformers' defaults, not this project's 500000 and 1e-5.
    assert (model.rope_theta, model.rms_norm_eps) == (10000.0, 1e-6)
    assert model.rope_scaling is None and not model.tie_word_embeddings


def test_imported_model_wins():
    """C92: every value of the file differs from the recipe's."""
    file = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "head_dim": 24, "tie_word_embeddings": True}
    file |= {"max_position_embeddings": 4096}
    model = with_model_config(file | {"num_key_value_heads": 2}).model
    assert model.model_dump(exclude={"rope_scaling"}) == {
        **{key: value for key, value in LLAMA.items() if key != "model_type"},
        **file,
        "num_key_value_heads": 2,
    }
    assert model.head_size == 24 != model.hidden_size // model.num_attention_heads


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_both_spellings_of_rope(key):
    old = with_model_config({"rope_theta": 5e5, "rope_scaling": {key: "llama3", **SCALING}})
    block = {key: "llama3", "rope_theta": 5e5, **SCALING}
    new = with_model_config({"rope_parameters": block})
    assert old == new
    assert new.model.rope_theta == 5e5
    assert new.model.rope_scaling.model_dump() == {"rope_type": "llama3", **SCALING}


@pytest.mark.parametrize(
    "file",
    [
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_plain_rope(file):
    model = with_model_config(file).model
    assert model.rope_theta == 5e5 and model.rope_scaling is None


def test_both_spellings_of_dtype():
    old, new = (with_model_config({key: "bfloat16"}) for key in ("torch_dtype", "dtype"))
    assert old == new


@pytest.mark.parametrize("spelling", ["--seq-len=32", "--seq_len=32", "--seq-len 32"])
def test_spellings_of_a_flag(spelling):
    assert parse_flags(spelling.split()).step.seq_len == 32


@pytest.mark.parametrize("form", ["{0} {1} {0} {2}", "{0}={1} {0}={2}"])
def test_the_last_of_two_recipes_counts_whole(form):
    """A script appends flags to a command that has them: values and name must not come apart."""
    Path("first.toml").write_text("[step]\nsteps = 5\n")
    Path("second.toml").write_text("[step]\nsteps = 7\n")
    config = parse_flags(form.format("--recipe", "first.toml", "second.toml").split())
    assert (config.recipe, config.step.steps) == ("second.toml", 7)


def test_the_last_of_two_model_configs_counts():
    for name, width in (("a.json", 64), ("b.json", 96)):
        Path(name).write_text(json.dumps(LLAMA | {"hidden_size": width}))
    config = parse_flags(["--model-config", "a.json", "--model-config", "b.json"])
    assert (str(config.config_json), config.model.hidden_size) == ("b.json", 96)


# Recipes, the resolved config and --help.


@pytest.mark.parametrize("recipe", [p.stem for p in sorted(RECIPES.glob("*.toml"))])
def test_recipe(recipe):
    config = load_recipe(recipe)
    assert config.model.architecture_error() is None
    assert config.run_dir == Path("runs", recipe)
    assert_reads_back(config)
    assert_reads_back(parse_flags(["--recipe", recipe]))


def assert_reads_back(config: Config) -> None:
    Path("resolved.toml").write_text(to_toml(config), encoding="utf-8")
    again = load_recipe("resolved.toml")
    assert again.model_dump(exclude={"recipe"}) == config.model_dump(
        exclude={"recipe", "config_json", "init_from"}
    )


def test_resolved_config_reads_back():
    """Values that TOML has no word for, or that a default could replace."""
    argv = [
        "--micro-batch-size",
        "2",
        "--lr",
        "1e-4",
        "--run-dir",
        "a dir/ü",
        "--dataset",
        'q"\\uote',
    ]
    argv += ["--keep-checkpoints", "0", "--head-dim", "32", "--tie-word-embeddings", "--zero", "2"]
    argv += ["--rope-scaling", json.dumps(SCALING), "--beta2", str(1 - 2**-53)]
    config = parse_flags(argv)
    assert config.run_dir == Path("a dir/ü") and config.model.rope_scaling.factor == 8.0
    assert config.optimizer.beta2 == 1 - 2**-53
    assert_reads_back(config)
    # --micro-batch-size none is absent from the file, and none again when it is read.
    assert_reads_back(parse_flags(["--micro-batch-size", "None", "--num-key-value-heads", "None"]))


def leaves(schema: type[BaseModel] = Config) -> dict[str, str]:
    """Flag to description, of all fields."""
    found = {}
    for name, field in schema.model_fields.items():
        if (
            name in ("layout", "memory", "model", "step", "optimizer", "data", "run")
            and schema is Config
        ):
            found |= leaves(field.annotation)
        else:
            name = "model-config" if name == "config_json" else name
            found["--" + name.replace("_", "-")] = field.description
    return found


def test_help(tmp_path):
    done = train_llm(tmp_path, "--help")
    assert done.returncode == 0 and done.stderr == ""
    # What is left without line breaks and box drawing is one line.
    text = re.sub(r"[\s│─╭╮╰╯]", "", done.stdout)
    for group in ("layout", "memory", "model", "step", "optimizer", "data", "run"):
        assert f"╭─ {group} options ─" in done.stdout
        title = Config.model_fields[group].annotation.__doc__.split("\n")[0]
        assert title.replace(" ", "") in text
    flags = leaves()
    assert len(flags) > 40
    for name, description in flags.items():
        assert description and description.endswith("."), name
        words = re.escape("".join(description.split()))
        assert re.search(rf"{name}.{{,60}}?{words}\(default:[^)]+\)", text), name
    assert text.count("(default:") == len(flags)


def test_help_shows_the_defaults_of_the_recipe(capsys):
    Path("mine.toml").write_text("[step]\nseq_len = 4321\n")
    with pytest.raises(SystemExit) as caught:
        parse_flags(["--recipe", "mine.toml", "--help"])
    assert not caught.value.code and "(default: 4321)" in capsys.readouterr().out


# wandb.

KEY = "a" * 40


@pytest.mark.parametrize(
    "environ, netrc, configured",
    [
        ({}, None, False),
        ({}, "", False),
        ({}, f"machine api.wandb.ai\n  login user\n  password {KEY}\n", True),
        ({}, f"machine api.other.ai\n  login user\n  password {KEY}\n", False),
        ({}, "machine api.wandb.ai\n  login user\n", False),  # no key in it
        ({}, "wandb\n", False),  # cannot be parsed
        ({"WANDB_API_KEY": KEY}, None, True),
        ({"WANDB_API_KEY": ""}, None, False),
        (
            {"WANDB_BASE_URL": "https://wandb.corp:8080"},
            f"machine wandb.corp\n  login user\n  password {KEY}\n",
            True,
        ),
        (
            {"WANDB_BASE_URL": "https://wandb.corp"},
            f"machine api.wandb.ai\n  login user\n  password {KEY}\n",
            False,
        ),
    ],
)
def test_wandb_key_configured(monkeypatch, tmp_path, environ, netrc, configured):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if netrc is not None:
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        (tmp_path / "netrc").write_text(netrc)
        (tmp_path / "netrc").chmod(0o600)
    assert wandb_key_configured() is configured


def test_wandb_key_in_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("NETRC")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert wandb_key_configured() is False
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    assert wandb_key_configured() is True


@pytest.mark.parametrize(
    "flag, environ, key, mode",
    [
        ("auto", {}, False, "offline"),
        ("auto", {}, True, "online"),
        ("auto", {"WANDB_MODE": "disabled"}, True, "disabled"),
        ("auto", {"WANDB_MODE": "dryrun"}, True, "offline"),
        ("auto", {"WANDB_MODE": "online"}, True, "online"),
        ("auto", {"WANDB_MODE": ""}, True, "online"),
        ("auto", {"WANDB_DISABLED": "true"}, True, "disabled"),
        ("auto", {"WANDB_DISABLED": "false"}, True, "online"),
        ("offline", {"WANDB_MODE": "disabled"}, True, "offline"),
        ("disabled", {"WANDB_MODE": "online"}, False, "disabled"),
    ],
)
def test_mode_of_wandb(monkeypatch, flag, environ, key, mode):
    for name, value in (environ | ({"WANDB_API_KEY": KEY} if key else {})).items():
        monkeypatch.setenv(name, value)
    assert wandb_mode(flag) == mode


@pytest.mark.parametrize(
    "text, expected",
    [("3h50m", 13800), ("90m", 5400), ("45s", 45), ("1d12h", 129600), ("1h1s", 3601)],
)
def test_duration(text, expected):
    assert seconds(text) == expected
    assert parse_flags(["--stop-after", text]).run.stop_after == text


@pytest.mark.parametrize("text", ["90", "0s", "0h0m", "50m3h", "3h 50m", "-3h", "1.5h", "h", ""])
def test_no_duration(text):
    """A bare number least of all: Slurm would take it for minutes."""
    with pytest.raises(
        ConfigError, match="--stop-after must be a duration such as 3h50m"
    ) as caught:
        parse_flags([f"--stop-after={text}"])
    assert repr(text) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "steps"), [("10-12", (10, 12)), ("3", (3, 3)), ("1-1", (1, 1))])
def test_profiled_steps(text, steps):
    assert step_range(text) == steps
    assert parse_flags(["--profile", text]).run.profile == text


@pytest.mark.parametrize("text", ["0", "3-2", "a", "1-", "-3", "1-2-3", "0-4", ""])
def test_no_steps_to_profile(text):
    with pytest.raises(ConfigError, match="--profile must be steps such as 10-12 or 10, not"):
        parse_flags([f"--profile={text}"])


# Resume.

BASE = ["--vocab-size", "257", "--lr-decay-steps", "100"]


@functools.cache
def identity_of(*argv: str) -> str:
    return json.dumps(identity(parse_flags(list(argv))) | {"data": "0123"})


def save(argv: list[str], step: int = 4) -> Path:
    """A run directory's checkpoint, as far as a restart looks at it before torch."""
    checkpoint = Path("run", "checkpoints", f"step-{step:08d}")
    checkpoint.mkdir(parents=True)
    counts = {"step": step, "tokens": 256 * step, "skipped_steps": 0, "world_size": 1}
    state = {**counts, "identity": json.loads(identity_of(*argv))}
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_sums(checkpoint, {"state.json": file_sum(checkpoint / "state.json")})
    return checkpoint


# flag: (another value, what is said of it, what the checkpoint has)
IDENTITY = {
    "--hidden-size": ("128", "128", "256"),
    "--intermediate-size": ("512", "512", "1024"),
    "--num-hidden-layers": ("2", "2", "4"),
    "--num-attention-heads": ("8", "8", "16"),
    "--num-key-value-heads": ("16", "16", "8"),
    "--head-dim": ("32", "32", "16"),
    "--vocab-size": ("300", "300", "257"),
    "--rope-theta": ("5e5", "500000.0", "10000.0"),
    "--rope-scaling": (json.dumps(SCALING), "{'rope_type': 'llama3'", "None"),
    "--rms-norm-eps": ("1e-6", "1e-06", "1e-05"),
    "--tie-word-embeddings": (None, "True", "False"),
    "--seq-len": ("256", "256", "128"),
    "--seed": ("1", "1", "0"),
    "--global-batch-size": ("16", "16", "8"),
    "--dtype": ("float64", "float64", "float32"),
    "--optimizer": ("sgd", "sgd", "adamw"),
    "--lr": ("1e-3", "0.001", "0.003"),
    "--warmup-steps": ("5", "5", "10"),
    "--lr-schedule": ("wsd", "wsd", "cosine"),
    "--lr-decay-steps": ("120", "120", "100"),
    "--min-lr-ratio": ("0.2", "0.2", "0.1"),
    "--weight-decay": ("0", "0.0", "0.1"),
    "--beta1": ("0.8", "0.8", "0.9"),
    "--beta2": ("0.99", "0.99", "0.95"),
    "--optimizer-state-dtype": ("bfloat16", "bfloat16", "float32"),
    "--grad-clip": ("0", "0.0", "1.0"),
}


def test_every_identity_field_has_a_row():
    names = {"--" + key.replace("_", "-") for key in identity(parse_flags(BASE))}
    assert names == set(IDENTITY) | {flag(key) for key in NOT_COMPARED}


@pytest.mark.parametrize("flag", IDENTITY)
def test_identity_must_match(flag):
    checkpoint = save(BASE)
    value, said, saved = IDENTITY[flag]
    config = parse_flags([*BASE, flag, *([value] if value else [])])
    with pytest.raises(ConfigError) as caught:
        check_resume(config, checkpoint)
    message = str(caught.value)
    assert message.startswith(f"{flag} {said}") and f" differs from the {saved} of " in message
    assert str(checkpoint) in message and "--run-dir" in message and "\n" not in message


def test_scaling_of_the_same_value_matches():
    """JSON has no difference between 8 and 8.0, and no order of keys."""
    checkpoint = save([*BASE, "--rope-scaling", json.dumps(SCALING)])
    ints = {key: int(value) for key, value in reversed(SCALING.items())}
    check_resume(parse_flags([*BASE, "--rope-scaling", json.dumps(ints)]), checkpoint)


@pytest.mark.parametrize(
    "argv",
    [
        "--tp 2 --zero 2 --sequence-parallel on",
        "--micro-batch-size 2",
        "--log-every 1 --eval-every 0 --eval-batches 3",
        "--checkpoint-every 7 --keep-checkpoints 0 --comm-timeout 5",
        "--wandb disabled --wandb-project other",
        "--steps 500",
        "--steps 11",
        "--tokenizer /moved --max-position-embeddings 4096",
        "--no-async-checkpoint --stop-after 3h",
    ],
)
def test_may_change(argv):
    checkpoint = save(BASE)
    config = parse_flags([*BASE, *argv.split()])
    check_resume(config, checkpoint)
    assert config.optimizer.lr_decay_steps == 100


def test_unset_fields_take_the_value_of_the_first_start():
    """120 steps were asked for; a longer run keeps the schedule, and says nothing of it."""
    checkpoint = save(["--steps", "120", "--vocab-size", "257"])
    config = parse_flags(["--steps", "200"])
    check_resume(config, checkpoint)
    assert (config.optimizer.lr_decay_steps, config.model.vocab_size) == (120, 257)
    with pytest.raises(ConfigError, match="--lr-decay-steps 200 differs from the 120 "):
        check_resume(parse_flags(["--steps", "200", "--lr-decay-steps", "200"]), checkpoint)


def test_fewer_steps_than_the_warm_up_may_be_left():
    """The schedule is the saved one, so that a shorter run is no schedule without a peak."""
    save(["--steps", "120", "--vocab-size", "257"])
    config, _, _ = load_config(["--run-dir", "run", "--steps", "5"])
    assert (config.step.steps, config.optimizer.lr_decay_steps) == (5, 120)


@pytest.mark.parametrize("counter", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_restart_forgets_the_checkpoint_that_was_named(monkeypatch, counter):
    """But only once an attempt of this launch has gone back to it."""
    for step in (4, 8):
        save(BASE, step=step)
    argv = [*BASE, "--run-dir", "run", "--resume", "step-4", "--steps", "100"]
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    RunDir(Path("run")).record_start({"launch": ["job 16", "process 1 on elsewhere"]})
    monkeypatch.setenv(counter, "1")
    assert load_config(argv)[0].run.resume == "step-4"
    RunDir(Path("run")).record_start({"launch": launch_ids()})
    assert load_config(argv)[0].run.resume is None
    monkeypatch.setenv(counter, "0")
    assert load_config(argv)[0].run.resume == "step-4"


def test_a_run_that_was_killed_at_its_end_is_finished(tmp_path):
    """status.json says so, and wandb gets what it lacks."""
    save(["--steps", "12", "--vocab-size", "257"], step=12)
    run = RunDir(Path("run"))
    run.write_status("running")
    run.metrics_jsonl.write_text('{"step": 11, "loss": 2.5}\n{"step": 12, "loss": 2.0}\n')
    argv = ["--run-dir", "run", "--steps", "12", "--wandb", "offline"]
    done = train_llm(tmp_path, *argv)
    assert done.returncode == 0 and "run is finished: 12 of 12 steps" in done.stdout
    assert run.read_status()["state"] == "finished" and run.read_status()["step"] == 12
    assert [row["step"] for row in read_wandb(Path("run")).rows] == [11, 12]
    (tmp_path / "again").mkdir()
    assert "wandb" not in train_llm(tmp_path / "again", *argv).stdout


def test_finished_run_says_so(tmp_path):
    save(["--steps", "12", "--vocab-size", "257"], step=4)
    save(["--steps", "12", "--vocab-size", "257"], step=12)
    done = train_llm(tmp_path, "--run-dir", "run", "--steps", "12")
    assert done.returncode == 0 and done.stderr == ""
    assert re.fullmatch(r"run is finished: 12 of 12 steps [^\n]*--steps[^\n]*\n", done.stdout)


def test_a_run_directory_alone_has_its_recipe(capsys):
    """Flags override it, and --recipe takes its place."""
    first = ["--run-dir", "run", "--lr", "1e-4", "--steps", "7", "--wandb", "disabled"]
    Path("run").mkdir()
    Path("run", "config.toml").write_text(to_toml(parse_flags(first)))
    assert capsys.readouterr().err == ""
    again = parse_flags(["--run-dir", "run"])
    assert again.recipe == "run/config.toml"
    again.recipe = "debug"
    assert again == parse_flags([*first, "--recipe", "debug"])
    assert capsys.readouterr().err == ""
    changed = parse_flags(["--run-dir=run", "--steps", "9"], console=False)
    assert (changed.step.steps, changed.optimizer.lr) == (9, 1e-4)
    assert parse_flags(["--run-dir", "run", "--recipe", "debug"]).optimizer.lr == 3e-3
    assert parse_flags(["--run-dir", "other"]).optimizer.lr == 3e-3
    # Its layout is one of many: it gives way to a flag, and where it does not fit the processes.
    text = to_toml(
        parse_flags(["--tp", "4", "--zero", "1", "--micro-batch-size", "2", "--lr", "1e-4"])
    )
    Path("run", "config.toml").write_text(text)
    for argv, world_size, layout in (
        ([], 4, (4, 1, 1, 2)),
        ([], 2, (1, 1, 3, None)),
        (["--pp", "2"], 4, (1, 2, 3, None)),
        (["--no-compile"], 4, (1, 1, 3, None)),
        (["--seq-len", "128"], 4, (1, 1, 3, None)),
        (["--steps", "9", "--log-every", "1"], 4, (4, 1, 1, 2)),
    ):
        config = parse_flags(["--run-dir", "run", *argv], world_size=world_size)
        sizes = config.layout.tp, config.layout.pp, config.layout.zero, config.step.micro_batch_size
        assert sizes == layout and config.optimizer.lr == 1e-4
    Path("run", "config.toml").write_text("[step]\nsteps = 'x'\n")
    with pytest.raises(ConfigError, match=r"--run-dir run: run/config\.toml: line 2, .*--recipe"):
        parse_flags(["--run-dir", "run"])


def test_home_directories(monkeypatch, tmp_path):
    """In a recipe and after an equals sign no shell has expanded them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("mine.toml").write_text("[run]\nrun_dir = '~/runs/x'\n[data]\ntokenizer = '~/tok'\n")
    config = parse_flags(["--recipe=~/mine.toml", "--calibration=~/c.toml", "--dataset=~/t.txt"])
    assert (config.run_dir, config.run.calibration) == (tmp_path / "runs/x", tmp_path / "c.toml")
    assert config.data.tokenizer == f"{tmp_path}/tok" and config.data.dataset == f"{tmp_path}/t.txt"
    parser = Parser()
    parser.add_argument("--out", type=Path)
    assert parser.parse_args(["--out=~/out"]).out == tmp_path / "out"
    with pytest.raises(ConfigError, match="--out: must not be empty"):
        parser.parse_args(["--out", ""])


@pytest.mark.parametrize("text", ["\ufeff[step]\nsteps = 7\n", "[step]\r\nsteps = 7\r\n"])
def test_a_recipe_from_another_system(text):
    Path("mine.toml").write_bytes(text.encode())
    assert load_recipe("mine.toml").step.steps == 7


SECRET_NAMES = """WANDB_API_KEY HF_TOKEN AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN PGPASSWORD DB_PASS
MYSQL_PWD GITHUB_PAT apiKey wandb-api-key X-Amz-Signature sig OPENAI_KEY2 BASIC_AUTH"""
PLAIN_NAMES = """NCCL_SOCKET_IFNAME TOKENIZERS_PARALLELISM PYTHONHASHSEED KEYBOARD PWD HF_TOKEN_PATH
SSH_AUTH_SOCK MAX_TOKENS num_key_value_heads tokenizer pad_token NCCL_IB_PKEY AUTHOR COMPASS"""


@pytest.mark.parametrize("name", [*SECRET_NAMES.split(), *PLAIN_NAMES.split()])
def test_names_of_secrets(name):
    assert is_secret(name) == (name in SECRET_NAMES.split())


def test_no_flag_has_the_name_of_a_secret():
    assert not [name for name in leaves() if is_secret(name)]


@pytest.mark.parametrize(
    "text, shown",
    [
        ("https://user:pw@host:80/x", "https://***@host:80/x"),
        ("git+https://tok@host/x", "git+https://***@host/x"),
        ("s3://key:se/cret@bucket", "s3://***@bucket"),
        ("https://h/x?a=1&sig=z&token=q", "https://h/x?a=1&sig=***&token=***"),
        ("x --wandb-api-key 'a b' --lr 3", "x --wandb-api-key *** --lr 3"),
        ("--hf-token=abc", "--hf-token=***"),
        ("export=ALL,WANDB_API_KEY=abc,FOO=1", "export=ALL,WANDB_API_KEY=***,FOO=1"),
        ("401 for hf_0123456789", "401 for ***"),
        ("--num-key-value-heads 3 --tokenizer t pad_token=x", None),
        ("http://host:8080/a@b tcp://127.0.0.1:29500 hf://datasets/a@rev/x", None),
    ],
)
def test_masked(monkeypatch, text, shown):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    assert masked(text) == (shown or text)


# The learning rate. Steps are 1-based.

SCHEDULES = ["cosine", "linear", "wsd", "constant"]


def rates(total: int, run_to: int | None = None, **fields) -> list[float]:
    """lr of steps 1 to run_to, by index; index 0 is never used."""
    section = OptimizerSection(lr=2.0, **fields)
    return [math.nan] + [lr_at(section, total, s) for s in range(1, (run_to or total) + 1)]


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("warmup, total", [(0, 1), (1, 1), (0, 10), (1, 10), (9, 10), (10, 10)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lr_is_between_minimum_and_peak(schedule, warmup, total, ratio):
    lr = rates(total, 3 * total, warmup_steps=warmup, lr_schedule=schedule, min_lr_ratio=ratio)
    for step in range(1, warmup + 1):
        assert lr[step] == pytest.approx(2.0 * step / warmup, rel=1e-15)
    peak = max(1, warmup)
    assert lr[peak] == 2.0  # reached, and at that step, also without a warm-up
    after = lr[peak:]
    assert all(math.isfinite(x) and 2.0 * ratio <= x <= 2.0 for x in after)
    assert all(later <= earlier for earlier, later in itertools.pairwise(after))
    # C90: it stays at the minimum.
    end = 2.0 if schedule == "constant" else 2.0 * ratio
    assert set(lr[max(total, peak + 1) :]) == {end}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lr_of_a_run_that_is_extended(schedule):
    """C90: decay over 10 steps, run to 30."""
    lr = rates(10, 30, warmup_steps=2, lr_schedule=schedule)
    assert max(lr[1:]) == lr[2] == 2.0
    assert lr[11:] == [2.0 if schedule == "constant" else 0.2] * 20


def test_shapes():
    """By hand: peak 2, minimum 0, warm-up to 2, over 10 steps."""
    shape = {s: rates(10, warmup_steps=2, min_lr_ratio=0.0, lr_schedule=s) for s in SCHEDULES}
    assert shape["linear"][2:] == pytest.approx([2, 1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25, 0])
    assert shape["cosine"][6] == pytest.approx(1.0)
    assert shape["cosine"][4] == pytest.approx(1 + math.sqrt(0.5))
    assert shape["wsd"][2:] == pytest.approx([2] * 7 + [1, 0])  # the last fifth: 2 steps
    assert shape["constant"][2:] == [2] * 9
    assert all(lr[1] == 1.0 for lr in shape.values())


def test_wsd_falls_from_the_end_of_a_long_warm_up():
    lr = rates(100, warmup_steps=90, lr_schedule="wsd", min_lr_ratio=0.0)
    assert lr[90] == 2.0 and lr[95] == pytest.approx(1.0) and lr[100] == 0.0


def test_lr_is_a_function_of_the_step_alone():
    """A resume starts anywhere, and steps + 1 is no other schedule."""
    section = OptimizerSection(lr=2.0, warmup_steps=3)
    forth = [lr_at(section, 20, step) for step in range(1, 30)]
    back = [lr_at(section, 20, step) for step in range(29, 0, -1)]
    assert forth == back[::-1] and len(set(forth[:20])) > 10


def test_a_field_that_a_checkpoint_lacks_has_its_default():
    """As one that was written before there was such a field."""
    checkpoint = save([])
    state = json.loads((checkpoint / "state.json").read_text())
    del state["identity"]["optimizer_state_dtype"], state["identity"]["rope_scaling"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_sums(checkpoint, {"state.json": file_sum(checkpoint / "state.json")})
    check_resume(parse_flags([]), checkpoint)
    with pytest.raises(
        ConfigError, match=r"--optimizer-state-dtype bfloat16 differs from the float32"
    ):
        check_resume(parse_flags(["--optimizer-state-dtype", "bfloat16"]), checkpoint)


def test_the_config_of_an_older_run(no_launcher, capsys):
    """With names and a mode that are no more."""
    config = parse_flags(["--micro-batch-size", "2", "--activation-checkpoint", "full"])
    older = to_toml(config).replace("micro_batch_size", "batch_size")
    Path("run").mkdir()
    Path("run", "config.toml").write_text(older.replace('"full"', '"selective"'))
    again = parse_flags(["--run-dir", "run"])
    assert (again.step, again.memory) == (config.step, config.memory)
    assert "run/config.toml: activation_checkpoint selective is gone" in capsys.readouterr().err
    assert parse_flags(["--batch-size", "4"]).step.micro_batch_size == 4
    with pytest.raises(ConfigError, match=r"^--activation-checkpoint selective is gone: use full"):
        parse_flags(["--activation-checkpoint", "selective"])
    with pytest.raises(ConfigError, match=r"older name of micro_batch_size: leave one of them out"):
        StepSection(batch_size=1, micro_batch_size=2)
