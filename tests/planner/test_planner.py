"""The planner: its formulas beside published runs, what must hold of any plan, and the command."""

import itertools
import json
import math
import re
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks import planner_accuracy
from parallel.layout import Dims, make_layout
from planner import report
from planner.machine import load_machine, ranks_on_a_node, write_calibration
from planner.memory import Options, memory
from planner.search import Search
from recipes.plan.__main__ import main
from recipes.plan.planning import own_flags
from tests.ranks import free_port
from tests.runs import REPO, run_main
from training.config.command_line import load_recipe, parse_flags
from training.config.options import planner_options, to_toml

LLAMA_70B = ["--recipe", "llama3_70b", "--gpu", "h100", "--gpus", "256"]
README, RECIPES = (REPO / "README.md").read_text(), REPO / "recipes"
# A layout of it that takes too much memory.
TOO_BIG = ["--zero", "1", "--micro-batch-size", "1", "--activation-checkpoint", "none"]


@pytest.fixture(scope="module")
def rows():
    return planner_accuracy.read_rows(planner_accuracy.ROWS)


def test_memory_of_published_runs(rows):
    sizes = [abs(error) for _, error in planner_accuracy.memory_errors(rows, "torchtitan")]
    assert len(sizes) == 18 and statistics.mean(sizes) <= 0.04 and max(sizes) <= 0.13
    sizes = [abs(error) for _, error in planner_accuracy.memory_errors(rows, "nanotron")]
    assert len(sizes) == 12 and statistics.mean(sizes) <= 0.07
    labels = planner_accuracy.memory_labels(rows)
    assert len(labels) == 23 and statistics.mean((x > 1) == out for _, x, out in labels) >= 0.9


def test_step_times_of_published_runs(rows):
    """Of dgxc by constants fitted to every fourth row; Hagemann's by their order in a sweep."""
    constants, others = planner_accuracy.calibrate(planner_accuracy.timed(rows, "dgxc"))
    errors = planner_accuracy.time_errors(others, constants)
    assert len(errors) == 19 and statistics.median(abs(e) for _, e in errors) <= 0.02
    sweeps = planner_accuracy.timed(rows, "hagemann")
    constants, _ = planner_accuracy.calibrate(sweeps)
    correlations, regrets = planner_accuracy.rankings(sweeps, constants)
    assert len(correlations) == 2
    assert min(correlations) >= 0.85 and statistics.median(regrets) <= 0.02


def test_nine_of_ten_published_runs_are_within_the_intervals(rows):
    """Those that the command prints, of the excerpt."""
    within, chosen = planner_accuracy.nine_in_ten, {"memory": ([], [])}
    for source in ("torchtitan", "nanotron"):
        for row, error in planner_accuracy.memory_errors(rows, source):
            x = row.layout
            chosen["memory"][x.pp > 1 or x.tp > 1 or x.cp > 4].append((row, error))
    for errors, interval in zip(chosen["memory"], report.MEMORY_ERRORS, strict=True):
        assert len(errors) >= 10 and within(errors) <= interval
    for source in ("dgxc", "hagemann"):
        timed = planner_accuracy.timed(rows, source)
        constants, others = planner_accuracy.calibrate(timed)
        table, fitted = report.TIME_ERRORS
        assert within(planner_accuracy.time_errors(timed, None)) <= table
        assert within(planner_accuracy.time_errors(others, constants)) <= fitted


def test_the_recipes_fit_where_the_readme_says():
    """By formula, on H100s of 80 GB."""
    table = re.findall(r"^\| `(llama3\w+)` \| [\d.]+B \| (\S+), (\d+) GPUs \|", README, re.M)
    assert {name for name, *_ in table} == {p.stem for p in RECIPES.glob("llama3*.toml")}
    for name, layout, gpus in table:
        config = load_recipe(name)
        size = config.step.global_batch_size
        search = Search(config.model, load_machine("h100"), planner_options(config), size)
        plan = search.at(int(gpus), own_flags(config, None))
        assert plan.layout.name == layout and search.fits(plan), (name, plan.layout, plan.gib)


@pytest.fixture(scope="module")
def search():
    model = load_recipe("llama3_8b").model
    model.vocab_size = 128256
    return Search(model, load_machine("h100"), Options(seq_len=8192), global_batch_size=64)


def test_every_layout_is_planned_or_rejected_with_a_reason(search):
    """Those that are tried are all that can be built, and each that is left out says why."""
    plans = search.all(16, {})
    names = {plan.structure for plan in plans}
    assert {(1, 1, 16, 1, 1), (2, 1, 1, 1, 8), (1, 2, 2, 2, 2)} <= names
    assert all(search.fits(plan) and plan.time.total > 0 for plan in plans)
    assert search.rejected and all(why.strip() for why in search.rejected)
    again = Search(search.model, search.machine, search.options, 64)
    built = sum(1 for _ in again.layouts(16, {}))
    too_big = sum(n for why, n in search.rejected.items() if why.startswith("too much memory"))
    assert len(plans) + too_big == built
    assert search.rejected.total() == again.rejected.total() + too_big


@pytest.mark.parametrize("faster", ["matmul_tflops", "hbm_tbs", "link_gbs", "peer_gbs", "nic_gbs"])
def test_time_never_grows_with_speed(search, faster):
    """Of the machine: whole steps, on one node and on several."""
    for gpus in (8, 16):
        for plan in search.all(gpus, {})[::7]:
            machine = replace(search.machine, **{faster: 2 * getattr(search.machine, faster)})
            better = Search(search.model, machine, search.options, 64).timed(plan)
            rounding = 1e-12 * plan.time.total
            assert better.time.total <= plan.time.total + rounding, plan.layout.name


def test_equal_dims_cost_the_same_by_any_name(search):
    """Replicas of one shard are ZeRO-0, and a collective does not ask for the name of its dim."""
    sizes = {"world_size": 16, "tp": 2, "micro_batch_size": 1}
    zero = search.layout(**sizes, zero=0)
    replicas = replace(zero, zero=1, dp=1, dp_replicate=8)
    plans = [search.timed(search.plan(layout, ("none", 1))) for layout in (zero, replicas)]
    assert plans[0].memory == plans[1].memory and plans[0].time == plans[1].time
    # One pass over twice the micro-batches: all but the optimizer takes twice as long.
    once = search.layout(**sizes)
    twice = replace(once, micro_batches=2 * once.micro_batches)
    a, b = (vars(search.timed(search.plan(x, ("none", 1))).time) for x in (once, twice))
    for item in ("compute", "tp", "cp", "host"):
        assert b[item] == pytest.approx(2 * a[item], rel=1e-3)
    assert b["optimizer"] == a["optimizer"]


def test_memory_never_grows_with_what_saves_it():
    """More dp shards, more tp with sequence parallelism, full checkpointing, loss chunks."""
    model = load_recipe("llama3_8b").model
    model.vocab_size = 128256

    def total(tp: int, dp: int, checkpoint: str, chunks: int) -> int:
        layout = make_layout(tp * dp, Dims(tp=tp), global_batch_size=64, micro_batch_size=1)
        savers = {"activation_checkpoint": checkpoint, "loss_chunks": chunks}
        options = Options(seq_len=8192, sequence_parallel=tp > 1, **savers)
        return memory(model, layout, options).total

    axes = ([1, 2, 4, 8], [1, 2, 8, 64], ["none", "full"], [1, 8])
    found = {key: total(*key) for key in itertools.product(*axes)}
    for key, size in found.items():
        for i, axis in enumerate(axes):
            at = axis.index(key[i])
            if at + 1 < len(axis):
                more = found[(*key[:i], axis[at + 1], *key[i + 1 :])]
                assert more <= size, (key, axis[at + 1])


def test_a_plan_without_torch():
    code = "import sys; from recipes.plan.__main__ import main; main(sys.argv[1:]); "
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code, *LLAMA_70B, "--memory-only"],
        check=True,
        cwd=REPO,
        stdout=subprocess.DEVNULL,
    )


def test_the_table_and_its_reasons(capsys):
    """A layout that does not fit is told what to change, and says what is not validated."""
    assert main([*LLAMA_70B, *TOO_BIG, "--layout", "pp2-dp16-tp8"]) == 0
    out = capsys.readouterr().out
    assert "your layout (pp2-dp16-tp8, ZeRO-1, batch 1x64) takes" in out
    assert "so that it fits, the fastest first:" in out
    assert "not in the table:" in out and "not validated: " in out
    assert main([*LLAMA_70B, "--keep", "tp=8", "pp=1"]) == 0
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()[1:-1]
    assert table and all("tp8" in line or "x8 " in line for line in table), table


def test_every_suggestion_fits(capsys):
    assert main([*LLAMA_70B, *TOO_BIG, "--layout", "pp2-dp16-tp8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("so that it fits")) + 1
    suggested = list(itertools.takewhile(lambda line: line.startswith("  --"), lines[first:]))
    assert suggested
    for line in suggested:
        flags = line.split("  ")[1].strip().split()
        own = ["--layout", "pp2-dp16-tp8"]
        if flags[0] in ("--pp", "--cp", "--tp"):
            sizes = {"pp": 2, "cp": 1, "tp": 8} | {flags[0][2:]: int(flags[1])}
            dp = 256 // (sizes["pp"] * sizes["cp"] * sizes["tp"])
            name = "pp{pp}-dp{dp}-cp{cp}-tp{tp}".format(dp=dp, **sizes)
            own, flags = ["--layout", name], flags[2:]
        assert main([*LLAMA_70B, *TOO_BIG, *own, *flags]) == 0
        assert "so that it fits" not in capsys.readouterr().out, line


LINK, NIC = 0.3, 0.4


def a_run(folder, *argv: str, gpus: int, device: str = "NVIDIA H100 80GB HBM3"):
    """A run directory whose steps took as long as links and network would make them."""
    config = parse_flags(["--recipe", "llama3_8b", *argv])
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(config))
    start = {"time": 1.0, "world_size": gpus, "device": device}
    (folder / "run.json").write_text(json.dumps({"starts": [start]}))
    machine = load_machine("h100")
    constants = replace(machine.constants, link=LINK, nic=NIC)
    size = config.step.global_batch_size
    machine = replace(machine, constants=constants)
    search = Search(config.model, machine, planner_options(config), size)
    seconds = search.at(gpus, own_flags(config, None)).time.total
    # Those of an earlier start, the first one of this, and half a line.
    steps = [(0, 77.0), (0, 77.0), *((2, f * seconds) for f in (9, 1, 1.01, 0.99))]
    lines = [json.dumps({"time": time, "step_s": s}) for time, s in steps]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, lines[0][:9]]))
    return folder


def test_learning_from_runs(tmp_path, capsys):
    """What was wrong is found and named, and the file is planned with."""
    file = tmp_path / "machine.json"
    runs = [
        a_run(tmp_path / "tp", "--tp", "8", gpus=8),
        a_run(tmp_path / "both", "--tp", "4", gpus=32),
        a_run(tmp_path / "dp", "--tp", "1", gpus=64),
        a_run(tmp_path / "large", "--tp", "8", "--micro-batch-size", "8", gpus=8),
    ]
    assert main(["--learn", *map(str, runs), "--calibration", str(file)]) == 0
    out = capsys.readouterr().out
    wrong = next(line for line in out.splitlines() if line.startswith("wrong: "))
    named = dict(re.findall(r"(\w+) [\d.]+ -> ([\d.]+)", wrong))
    assert named.keys() == {"link", "nic"}
    assert float(named["link"]) == pytest.approx(LINK, rel=0.1), out
    assert float(named["nic"]) == pytest.approx(NIC, rel=0.1), out
    errors = [abs(float(error)) for error in re.findall(r"^now .* \(([-+.\d]+)%\)", out, re.M)]
    assert len(errors) == 4 and max(errors) < 2, out
    assert load_machine("h100", file).source.startswith("learnt from ")

    # One step time alone does not tell which constant it is.
    assert main(["--learn", str(runs[0]), "--calibration", str(tmp_path / "one.json")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^perhaps wrong: \w+ [\d.]+ -> [\d.]+$", out, re.M)
    assert re.search(r"as well: .*link 0.75 -> 0\.[23]", out)

    on_cpu = a_run(tmp_path / "cpu", gpus=2, device="cpu")
    assert main(["--learn", str(on_cpu)]) == 2
    err = capsys.readouterr().err
    assert "ran on cpu" in err and "--calibrate" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (["--keep", "tp"], "--keep tp is not NAME=VALUE"),
        (["--gpu", "h10"], "h10"),
        (["--gpu", "l40s"], "--gpu l40s: the table has only its peak"),
        (["--emit", "plan.txt"], "--emit plan.txt: name a file that ends in .toml"),
        (["--learn", "no/such"], "--learn no/such"),
        (["--gpus", "16", "--keep", "pp=3"], "--keep pp=3: 3 does not divide the 16 GPUs"),
        (["--gpus", "8", "--layout", "4x4"], "--layout 4x4 is of 16 GPUs, and --gpus is 8"),
        (["--nic", "-5"], "--nic: -5 is not a number above 0"),
        (["--price", "nan"], "--price: nan is not a number above 0"),
        (["--world-size", "16"], "--world-size 16: here it is --gpus"),
        (["--grad-compression", "bf16"], "--grad-compression bf16 is not planned"),
        (["--warmup-steps", "9999999"], "--warmup-steps 9999999 exceeds"),
    ],
)
def test_refusals(argv, fault, capsys):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert fault in err and err.count("\n") == 1


def test_groups_that_do_not_line_up_with_nodes_are_cut():
    """Six of eight ranks to a node: some groups share a node, others go over the network."""
    assert [ranks_on_a_node(n, 1, 8) for n in (2, 3, 4, 6, 8, 12, 16)] == [2, 1, 4, 2, 8, 4, 8]
    assert [ranks_on_a_node(2, stride, 8) for stride in (1, 2, 4, 8, 16)] == [2, 2, 2, 1, 1]
    machine, size = load_machine("h100"), 1e9
    aligned, cut, alone = (
        machine.collective_seconds(size, ranks, 1, "all_gather", world)
        for ranks, world in ((8, 24), (6, 24), (6, 6))
    )
    assert cut > 2 * aligned > 0 and alone < aligned


def test_an_emitted_recipe_plans_as_before(tmp_path, capsys):
    """Its layout is the first, and what is planned of it otherwise is as of the original."""
    file = tmp_path / "plan.toml"
    argv = ["--recipe", "llama3_70b", "--gpus", "64"]
    assert main([*argv, "--emit", str(file)]) == 0
    assert file.read_text().startswith("# Planned by recipes.plan: ")
    capsys.readouterr()
    argv[1] = str(file)
    assert main(argv) == 0 and " takes as long" in capsys.readouterr().out
    tables = []
    for argv[1] in ("llama3_70b", str(file)):
        assert main([*argv, "--keep", "tp=8", "activation_checkpoint=full"]) == 0
        tables.append(capsys.readouterr().out.split("\n\n")[1])
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda x: None, "NoneType"),
        (lambda x: {**x, "usable_gib": "80"}, "usable_gib is '80', not a number above 0"),
        (lambda x: {**x, "node": 7.5}, "node is 7.5, not a whole number"),
        (lambda x: {**x, "constants": {**x["constants"], "link": 0}}, "link is 0"),
        (lambda x: {**x, "constants": {**x["constants"], "hbm": math.nan}}, "hbm is nan"),
    ],
)
def test_a_damaged_calibration(tmp_path, damage, fault, capsys):
    file = tmp_path / "machine.json"
    write_calibration(file, load_machine("h100"))
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    assert main(["--calibration", str(file)]) == 2
    err = capsys.readouterr().err
    assert fault in err and "measure it anew" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("keep", "name"),
    [(["tp=2", "pp=2"], "pp2-dp1-tp2"), (["cp=2", "dp_replicate=2"], "rep2-dp1-cp2-tp1")],
)
def test_an_emitted_recipe_trains(launched4, tmp_path, capsys, keep, name):
    file = tmp_path / "plan.toml"
    small = ["--num-hidden-layers", "4", "--seq-len", "32", "--global-batch-size", "8"]
    plan = ["--recipe", "debug", "--gpus", "4", "--keep", *keep, *small]
    assert main([*plan, "--emit", str(file)]) == 0
    assert name in capsys.readouterr().out
    argv = [
        "--recipe",
        str(file),
        "--steps",
        "1",
        "--warmup-steps",
        "1",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    code, out = launched4.run(run_main, argv, free_port())[0]
    assert code == 0 and f"layout {name}: " in out, out
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()
