"""What is measured: FLOPs against torch's own counter, memory, records, the terminal, wandb."""

import errno
import io
import json
import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import training.run.reporter
from common.files import append_line
from models.config import LlamaConfig, flops_per_token
from planner.machine import peak_flops
from tests.runs import read_wandb, wandb_records
from training.config.schema import RunSection
from training.run.directory import RunDir
from training.run.metrics import PeakMemory, Window, Work, make_record
from training.run.reporter import Reporter

KEY = "0123456789abcdef0123456789abcdef01234567"
WINDOW = {
    "steps": 10,
    "tokens": 20480,
    "seconds": 9.75,
    "data_seconds": 0.5,
    "update_seconds": 0.25,
    "peak_memory_bytes": 1 << 30,
}
STEP = {
    "step": 10,
    "loss": 4.1234,
    "grad_norm": 1.2345,
    "lr": 3e-3,
    "tokens": 20480,
    "skipped_steps": 0,
}


@pytest.fixture(autouse=True)
def no_wandb_account(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return RunDir(path)


def record(peak_flops=None, **changes):
    work = Work(flops_per_token=25_000_000, world_size=4, peak_flops=peak_flops)
    return make_record(Window(**WINDOW), work, **STEP | changes)


def report(run_dir, mode="disabled", stream=None, **changes):
    arguments = {"config_dump": {"step": {"seed": 0}}, "first_step": 0, "steps": 120, **changes}
    return Reporter(run_dir, RunSection(wandb=mode), stream=stream or io.StringIO(), **arguments)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# FLOPs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 2},
        {"tie_word_embeddings": True},
        {"head_dim": 12, "num_key_value_heads": 1},
    ],
    ids=["mha", "gqa", "tied", "head_dim"],
)
def test_flops_are_those_that_torch_counts(changes):
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig as HFConfig
    from transformers import LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=61,
        **changes,
    )
    hf = HFConfig(
        **config.model_dump(exclude_none=True, exclude={"rope_scaling", "rope_theta"}),
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(hf)
    batch, seq_len = 2, 24
    tokens = torch.randint(61, (batch, seq_len))
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    assert counter.get_total_flops() == batch * seq_len * flops_per_token(config, seq_len)


def test_flops_of_llama3_8b():
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    # 8,030,261,248 parameters, less 525,336,576 of the embedding and 266,240 of the norms.
    assert flops_per_token(config, 8192) == 6 * 7_504_658_432 + 12 * 32 * 32 * 128 * 8192


@pytest.mark.parametrize(
    "name, tera",
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", None),
        ("NVIDIA A10G", None),
        ("NVIDIA A10", None),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", None),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("Tesla V100-SXM2-16GB", None),
        ("cpu", None),
    ],
)
def test_peak_flops_by_name(name, tera):
    assert peak_flops(name, "bfloat16") == (None if tera is None else pytest.approx(tera * 1e12))
    assert peak_flops(name, "float32") is None


# Memory


def touched(mib):
    return torch.ones(mib << 18)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_sees_a_tensor_and_forgets_a_freed_one():
    mib = 1 << 20
    touched(1)
    memory = PeakMemory("cpu")
    assert memory.peak_bytes() < 8 * mib
    freed = touched(96)
    del freed
    assert 90 * mib < memory.peak_bytes() < 110 * mib
    memory.reset()
    assert memory.peak_bytes() < 16 * mib
    kept = touched(64)
    assert 60 * mib < memory.peak_bytes() < 80 * mib
    memory.reset()
    # What is still in use counts after a reset too.
    assert 60 * mib < memory.peak_bytes() < 80 * mib and kept[-1] == 1


def test_peak_memory_without_proc(monkeypatch):
    monkeypatch.setattr(
        "pathlib.Path.write_text", lambda *_: (_ for _ in ()).throw(OSError(13, ""))
    )
    memory = PeakMemory("cpu")
    grown = touched(96)
    assert memory.peak_bytes() >= 0 and grown[0] == 1
    monkeypatch.setattr("training.run.metrics._lifetime_peak_bytes", lambda: None)
    assert PeakMemory("cpu").peak_bytes() is None


# Records


def test_record_by_hand():
    got = record(peak_flops=100e12)
    fields = (
        "step, loss, grad_norm, lr, tokens, skipped_steps, tokens_per_s, tokens_per_s_per_device, "
        "step_s, data_s, update_s, mfu, tflops_per_device, peak_memory_bytes, time"
    )
    assert ", ".join(got) == fields
    assert got["tokens_per_s"] == pytest.approx(2100.5128)
    assert got["tokens_per_s_per_device"] == pytest.approx(525.1282)
    assert got["step_s"] == pytest.approx(0.975) and got["data_s"] == pytest.approx(0.05)
    assert got["update_s"] == pytest.approx(0.025)
    # 525.1282 tokens/s * 25 MFLOP = 13.128 GFLOP/s per device.
    assert got["tflops_per_device"] == pytest.approx(0.01312821, rel=1e-5)
    assert got["mfu"] == pytest.approx(0.0001312821, rel=1e-5)
    assert abs(got["time"] - time.time()) < 5
    assert record()["mfu"] is None


def test_non_finite_numbers_are_null_and_named(run_dir):
    reporter = report(run_dir)
    reporter.log(record(step=1, loss=float("nan"), grad_norm=float("inf")))
    reporter.log(record(step=2))
    reporter.log_eval({"step": 2, "eval_loss": float("-inf"), "eval_tokens": 7})

    def refuse(constant):
        raise AssertionError(constant)

    for path in (run_dir.metrics_jsonl, run_dir.eval_jsonl):
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=refuse)
    first, second = lines(run_dir.metrics_jsonl)
    assert first["loss"] is None and first["non_finite"] == ["loss", "grad_norm"]
    assert "non_finite" not in second
    assert lines(run_dir.eval_jsonl)[0]["non_finite"] == ["eval_loss"]


def test_lines_go_to_the_file_that_a_resume_has_replaced(run_dir):
    reporter = report(run_dir)
    for step in (1, 2, 3):
        reporter.log(record(step=step))
    run_dir.cut_metrics(1)
    reporter.log(record(step=2))
    assert [line["step"] for line in lines(run_dir.metrics_jsonl)] == [1, 2]


# Terminal


def test_plain_lines_without_a_terminal(run_dir):
    stream = io.StringIO()
    reporter = report(run_dir, stream=stream)
    reporter.message("dataset [red] 3 documents")
    reporter.log(record())
    reporter.log(record(step=120, loss=float("nan"), skipped_steps=2, peak_flops=0.1e12))
    reporter.log_eval({"step": 120, "eval_loss": 3.9, "eval_tokens": 12345})
    reporter.close()
    assert stream.getvalue().splitlines() == [
        "dataset [red] 3 documents",
        "step 10/120  loss 4.1234  grad_norm 1.2345  lr 3.00e-03  2.1k tokens/s  0.97 s/step  "
        "ETA 1m47s",
        "step 120/120  loss none  grad_norm 1.2345  lr 3.00e-03  2.1k tokens/s  0.97 s/step  "
        "mfu 13.1%  2 skipped  ETA 0m00s",
        "step 120/120  eval_loss 3.9000  over 12.3k tokens",
    ]
    assert all(c.isprintable() or c == "\n" for c in stream.getvalue())


def on_terminal(run_dir, term, mode="disabled"):
    """What a person sees; stdin, stdout and stderr are a terminal."""
    code = (
        "import sys, json; from pathlib import Path\n"
        "from training.run.directory import RunDir\n"
        "from training.config.schema import RunSection\n"
        "from training.run.reporter import Reporter\n"
        "run = RunSection(wandb=sys.argv[2])\n"
        "r = Reporter(RunDir(Path(sys.argv[1])), run, config_dump={}, first_step=5, steps=120)\n"
        "r.log(json.loads(sys.argv[3])); r.message('a [red] note'); r.close()\n"
    )
    main, child = pty.openpty()
    arguments = [sys.executable, "-c", code, str(run_dir.path), mode, json.dumps(record())]
    process = subprocess.Popen(
        arguments, stdin=child, stdout=child, stderr=child, env={**os.environ, "TERM": term}
    )
    os.close(child)
    seen = b""
    try:
        while chunk := os.read(main, 4096):
            seen += chunk
    except OSError:  # Linux says EIO where the other end is closed.
        pass
    os.close(main)
    assert process.wait(timeout=30) == 0, seen.decode()
    return seen.decode()


def test_bar_on_a_terminal(run_dir):
    seen = on_terminal(run_dir, "xterm")
    assert "\x1b[" in seen
    for part in ("10/120", "loss 4.1234", "2.1k tokens/s", "ETA 1m47s", "a [red] note"):
        assert part in seen
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l"), "the cursor stays hidden"


def test_dumb_terminal_and_no_prompt_without_a_key(run_dir):
    # online without a key: refused by the configuration, but if it comes here it must not ask.
    seen = on_terminal(run_dir, "dumb", mode="online")
    assert "\x1b" not in seen and "step 10/120  loss 4.1234" in seen
    assert "wandb: online failed (UsageError" in seen and "going on offline" in seen
    assert len([line for line in seen.splitlines() if "wandb" in line]) == 2


# wandb


def secret_holders(folder, secret):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if secret.encode() in path.read_bytes()]


def test_offline_run_shows_each_step_once_under_one_id(run_dir, tmp_path):
    """In its newest start, also where that repeats steps, as after a kill."""
    for first, steps in ((0, (1, 2, 3)), (1, (2, 3)), (3, (4,))):
        stream = io.StringIO()
        run_dir.cut_metrics(first)
        reporter = report(run_dir, "offline", stream, first_step=first)
        for step in steps:
            reporter.log(record(step=step, loss=float("nan") if step == 4 else 5.0 - step))
        reporter.log_eval({"step": step, "eval_loss": 2.5, "eval_tokens": 7})
        reporter.close()
        said = [line for line in stream.getvalue().splitlines() if "wandb" in line]
        assert len(said) == 1 and said[0].startswith("wandb: offline, upload with: wandb sync /")
        newest = Path(said[0].split()[-1])
        assert newest == sorted(run_dir.path.glob("wandb/offline-run-*"))[-1]

    history = read_wandb(run_dir.path)
    assert len(list(run_dir.path.glob("wandb/offline-run-*"))) == 3
    assert history.ids == [run_dir.wandb_id()] * 3
    assert history.axes == [("*", "step")] * 3
    train = [row for row in history.rows if "loss" in row]
    assert [row["step"] for row in train] == [1, 2, 3, 4]
    assert [row["loss"] for row in train[:3]] == [4.0, 3.0, 2.0]
    assert [row["non_finite_steps"] for row in train] == [0, 0, 0, 1]
    assert [row["step"] for row in history.rows if row.get("eval_loss") == 2.5] == [3, 4]
    assert [row["_step"] for row in history.rows] == [1, 2, 3, 4]
    assert history.config["step"] == {"seed": 0}

    shutil.copytree(run_dir.path, tmp_path / "fork", symlinks=True)
    assert RunDir(tmp_path / "fork").wandb_id() != run_dir.wandb_id()


def test_what_a_killed_process_had_not_written_is_filled_in(run_dir):
    """wandb writes every few seconds, so a SIGKILL loses rows that metrics.jsonl has."""
    code = (
        "import json, os, sys; from pathlib import Path\n"
        "from training.run.directory import RunDir\n"
        "from training.config.schema import RunSection\n"
        "from training.run.reporter import Reporter\n"
        "run = RunSection(wandb='offline')\n"
        "r = Reporter(RunDir(Path(sys.argv[1])), run, config_dump={}, first_step=0, steps=120)\n"
        "[r.log(json.loads(row)) for row in sys.argv[2:]]; os.kill(os.getpid(), 9)\n"
    )
    lines = [json.dumps(record(step=step)) for step in (1, 2, 3)]
    argv = [sys.executable, "-c", code, str(run_dir.path), *lines]
    assert subprocess.run(argv, capture_output=True, timeout=60).returncode == -9
    assert read_wandb(run_dir.path).rows == []
    time.sleep(1.1)  # wandb names its folders by the second
    run_dir.cut_metrics(2)
    reporter = report(run_dir, "offline", io.StringIO(), first_step=2)
    for step in (3, 4):
        reporter.log(record(step=step))
    reporter.close()
    history = read_wandb(run_dir.path)
    assert [(row["step"], row["_step"]) for row in history.rows] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert set(history.ids) == {run_dir.wandb_id()}


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_start_logs_every_step_that_the_server_lacks(run_dir, monkeypatch, mode):
    """Online, wandb says how far the server is; an offline start has the whole history."""
    import wandb

    asked, logged = {}, []

    def init(**arguments):
        asked.update(arguments)
        return SimpleNamespace(
            starting_step=4 if mode == "online" else 0,
            define_metric=lambda name, step_metric: None,
            log=lambda values, step: logged.append((step, "eval_loss" in values)),
            finish=lambda exit_code: None,
            url="https://server/run",
            sync_dir="wandb/run",
        )

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(wandb, "init", init)
    for step in (1, 3, 5):
        append_line(run_dir.metrics_jsonl, json.dumps(record(step=step)))
    for step in (3, 4, 5):
        row = {"step": step, "eval_loss": 2.5, "eval_tokens": 7}
        append_line(run_dir.eval_jsonl, json.dumps(row))
    reporter = report(run_dir, mode, first_step=5)
    reporter.log(record(step=6))
    reporter.close()
    assert asked["id"] == run_dir.wandb_id()
    assert asked.get("resume") == ("allow" if mode == "online" else None)
    rows = [(1, False), (3, False), (3, True), (4, True), (5, False), (5, True), (6, False)]
    assert logged == (rows[3:] if mode == "online" else rows)


def test_a_full_disk_costs_no_row(run_dir, monkeypatch):
    """Rows that cannot be written wait for room, in their order, and training goes on."""
    stream = io.StringIO()
    reporter = report(run_dir, "disabled", stream)
    real = training.run.reporter.append_line

    def full(path, line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    reporter.log(record(step=1))
    monkeypatch.setattr(training.run.reporter, "append_line", full)
    for step in (2, 3):
        reporter.log(record(step=step))
    with pytest.raises(OSError):
        reporter.flush()
    monkeypatch.setattr(training.run.reporter, "append_line", real)
    reporter.log(record(step=4))
    lines = run_dir.metrics_jsonl.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert stream.getvalue().count("cannot be written (No space left on device)") == 1


def test_a_line_is_appended_whole_or_not_at_all(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        append_line(tmp_path / "lines", "a" * 3000)
        with pytest.raises(OSError):
            append_line(tmp_path / "lines", "b" * 3000)
        assert (tmp_path / "lines").read_text() == "a" * 3000 + "\n"
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_unreachable_server_does_not_stop_training_and_no_key_is_written(run_dir, monkeypatch):
    # Its own process: wandb reads its environment once.
    code = (
        "import json, sys, wandb; from pathlib import Path\n"
        "from training.run.directory import RunDir\n"
        "from training.config.schema import RunSection\n"
        "from training.run.reporter import Reporter\n"
        "init = wandb.init\n"
        "def shorter(*, settings, **arguments):\n"
        "    assert settings.init_timeout == 30\n"
        "    settings.init_timeout = 3\n"
        "    return init(settings=settings, **arguments)\n"
        "wandb.init = shorter\n"
        "run = RunSection(wandb='auto')\n"
        "r = Reporter(RunDir(Path(sys.argv[1])), run, config_dump={}, first_step=0, steps=120)\n"
        "r.log(json.loads(sys.argv[2])); r.close()\n"
    )
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    # As after a parent process that had a run of its own, and has ended it.
    monkeypatch.setenv("WANDB_SERVICE", "3-1-unix-/nowhere/socket")
    arguments = [sys.executable, "-c", code, str(run_dir.path), json.dumps(record())]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=40)
    said = done.stdout.splitlines()
    assert said[0].startswith("wandb: online failed (") and said[0].endswith("going on offline")
    assert said[1].startswith("wandb: offline, upload") and said[2].startswith("step 10/120")
    assert len(said) == 3 and done.stderr == "" and done.returncode == 0
    assert [row["step"] for row in read_wandb(run_dir.path).rows] == [10]
    assert set(read_wandb(run_dir.path).ids) == {run_dir.wandb_id()}
    assert secret_holders(run_dir.path, KEY) == [] and KEY not in done.stdout


def test_wandb_that_breaks_later_is_left_behind(run_dir, monkeypatch):
    stream = io.StringIO()
    reporter = report(run_dir, "offline", stream)

    def broken(*_, **__):
        raise RuntimeError(f"no disk for {KEY}\nsecond line")

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(type(reporter._wandb._run), "log", broken)
    reporter.log(record(step=1))
    reporter.log(record(step=2))
    reporter.close()
    said = [line for line in stream.getvalue().splitlines() if "failed" in line]
    assert said == ["wandb: log failed (RuntimeError: no disk for ***); going on without wandb"]
    assert [line["step"] for line in lines(run_dir.metrics_jsonl)] == [1, 2]


def test_variables_of_wandb_beat_our_defaults_and_flags_beat_them(run_dir, tmp_path):
    """Also the id, in every start, and the command that uploads it."""
    code = (
        "import json, os, sys; from pathlib import Path\n"
        "from training.run.directory import RunDir\n"
        "from training.config.schema import RunSection\n"
        "from training.run.reporter import Reporter\n"
        "for i, (variables, flags) in enumerate(json.loads(sys.argv[2])):\n"
        "    os.environ.update(variables)\n"
        "    if not os.fork():\n"
        "        run, path = RunSection(wandb='offline', **flags), Path(sys.argv[1])\n"
        "        r = Reporter(RunDir(path), run, config_dump={}, first_step=i, steps=9)\n"
        "        r.close(); os._exit(0)\n"
        "    os.wait()\n"
    )
    names = {"WANDB_PROJECT": "p", "WANDB_NAME": "n", "WANDB_TAGS": "a,b", "WANDB_RUN_GROUP": "g"}
    flags = {"wandb_project": "q", "wandb_name": "m", "wandb_group": "h", "wandb_tags": ["c"]}
    shared = {"WANDB_RUN_ID": "mine", "WANDB_DIR": str(tmp_path / "shared")}
    (tmp_path / "shared").mkdir()
    starts = [({}, {}), (names, {}), (shared, flags)]
    argv = [sys.executable, "-c", code, str(run_dir.path), json.dumps(starts)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    commands = [line.partition("upload with: ")[2] for line in done.stdout.splitlines()]
    files = sorted(tmp_path.glob("*/wandb/*run-*/*.wandb"), key=os.path.getmtime)
    assert commands == [f"wandb sync {file.parent}" for file in files], done
    runs = [
        (r.run.project, r.run.display_name, r.run.run_group, list(r.run.tags), r.run.run_id)
        for file in files
        for r in wandb_records(file)
        if r.WhichOneof("record_type") == "run"
    ]
    first = runs[0][-1]
    assert runs == [
        ("parallel-recipes", "", "", [], first),
        ("p", "n", "g", ["a", "b"], first),
        ("q", "m", "h", ["c"], "mine"),
    ]
    assert run_dir.wandb_id() == "mine"


def test_disabled_does_not_import_wandb(run_dir):
    code = (
        "import sys; from pathlib import Path\n"
        "from training.run.directory import RunDir\n"
        "from training.config.schema import RunSection\n"
        "from training.run.reporter import Reporter\n"
        "run = RunSection(wandb='disabled')\n"
        "r = Reporter(RunDir(Path(sys.argv[1])), run, config_dump={}, first_step=0, steps=1)\n"
        "r.close(); sys.exit(any(m in sys.modules for m in ('wandb', 'torch.distributed.fsdp')))\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(run_dir.path)]).returncode == 0
    assert not (run_dir.path / "wandb").exists()
