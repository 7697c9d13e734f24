"""Batch scripts: what is rendered, and what a Slurm of two nodes on this machine makes of it."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from common.errors import LayoutError
from launch.slurm.__main__ import main
from parallel.layout import layout_flags, parse_layout
from tests.runs import REPO, SMALL, read_wandb, rows

CLUSTER = REPO / "tests" / "slurm_cluster.sh"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare")
missing = [p for p in PROGRAMS if not shutil.which(p, path=os.environ["PATH"] + ":/usr/sbin")]
if (
    not missing
    and subprocess.run(
        ["unshare", "--mount", "--uts", "true"], stderr=subprocess.DEVNULL
    ).returncode
):
    missing = ["the right to make namespaces (root)"]
needs_slurm = pytest.mark.skipif(
    bool(missing), reason=f"needs a Slurm (see {CLUSTER.name}); missing: {', '.join(missing)}"
)
needs_shellcheck = pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """A copy of the repository: scripts, outputs and runs are written into it."""
    copy = tmp_path_factory.mktemp("slurm") / "repo"
    hidden = shutil.ignore_patterns(".*", "runs", "wandb", "__pycache__", "*.egg-info", "site.toml")
    return shutil.copytree(REPO, copy, ignore=hidden)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The environment of a login node."""
    folder = tmp_path_factory.mktemp("cluster")
    # Below the ports that the kernel gives away; the tests of another checkout have another.
    port = 16000 + os.getpid() % 3000 * 4
    subprocess.run([CLUSTER, "start", folder, str(port)], check=True, timeout=60)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "WANDB_"))}
    environ |= {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NETRC": str(folder / "no-netrc"),
    }
    yield environ
    subprocess.run(["scancel", "--user=root"], env=environ)
    time.sleep(1)
    subprocess.run([CLUSTER, "stop", folder], check=True)


@pytest.fixture(scope="module")
def slurm(cluster, repo):
    """Run a command in ``repo`` as on a login node; its stdout."""

    def run(*words: str | int, fails: bool = False) -> str:
        done = subprocess.run(
            list(map(str, words)),
            cwd=repo,
            env=cluster,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert fails or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + (done.stderr if fails else "")

    return run


@pytest.fixture(autouse=True)
def no_runs_yet(monkeypatch, tmp_path):
    """Flags are compared with the runs of the repository; these tests are about new ones."""
    monkeypatch.setattr("launch.slurm.__main__.REPO", tmp_path)
    monkeypatch.chdir(tmp_path)


def render(capsys, *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.fixture
def site(tmp_path):
    """A site's settings with everything in them."""
    file = tmp_path / "site.toml"
    file.write_text((REPO / "launch/slurm/site.example.toml").read_text().replace("# c", "c"))
    (tmp_path / "activate").touch()
    text = file.read_text().replace(".venv/bin/activate", str(tmp_path / "activate"))
    file.write_text(text)
    return file


COMMANDS = {
    "one node": ["--", "--recipe", "debug", "--tp", "4"],
    "two nodes": ["--nodes", "2", "--", "--tp", "2", "--run-dir", "runs/it's a b"],
    "512 nodes": ["--nodes", "512", "--", "--recipe", "llama3_405b"],
    "no GPUs": ["--gpus-per-node", "0", "--processes-per-node", "2", "--", "--tp", "2"],
    "an array": ["--layouts", "1x8", "2x4", "pp2-dp2-cp1-tp2", "--", "--recipe", "debug"],
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("with_site", [False, True])
@needs_shellcheck
def test_what_is_rendered_is_a_clean_script(words, with_site, site, capsys, tmp_path):
    text = render(capsys, *(["--site", str(site)] if with_site else []), *words)
    file = tmp_path / "job.sbatch"
    file.write_text(text)
    subprocess.run(["bash", "-n", file], check=True)
    found = subprocess.run(["shellcheck", file], capture_output=True, text=True)
    assert not found.stdout
    assert "source launch" not in text, "complete in itself"
    assert "# SBATCH" not in text
    header = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert text.splitlines()[2 : 2 + len(header)] == header, "sbatch stops reading at a command"
    for option in ("--ntasks-per-node=1", "--open-mode=append", "--requeue", "--signal=B:USR1@300"):
        assert f"#SBATCH {option}" in header
    output = next(line for line in header if "--output=" in line)
    assert "%x" in output and "%N" in output and ("%j" in output or "%A_%a" in output)
    if with_site:
        assert "#SBATCH --account=my-project" in header and "#SBATCH --exclusive" in header
        assert "#SBATCH --cpus-per-task=96" in header
        assert "module load cuda/12.8" in text and "export NCCL_SOCKET_IFNAME=ib0" in text
        assert f'--container-mounts="{tmp_path}:{tmp_path},/scratch:/scratch"' in text


@needs_shellcheck
def test_the_templates_and_scripts_are_clean():
    scripts = [*(REPO / "launch").glob("*.sh"), *(REPO / "launch/slurm").glob("*.sbatch")]
    scripts += [*(REPO / "tests").glob("*.sh")]
    assert len(scripts) >= 4
    found = subprocess.run(["shellcheck", "-x", *scripts], cwd=REPO, capture_output=True, text=True)
    assert not found.stdout


def test_every_line_that_is_rendered_over_is_in_its_template(capsys):
    text = render(capsys, "--", "--tp", "8")
    assert "flags=(--tp 8)" in text and "run_dir=runs/debug" in text
    text = render(capsys, "--layouts", "2x4", "8x1", "--", "--steps", "30")
    assert "layouts=(2x4 8x1)" in text
    assert 'flags=(--log-every 1 --steps 30 "${layout[@]}")' in text, "the layout wins"
    assert "#SBATCH --array=0-1" in text and "out=runs/compare-debug" in text


@pytest.mark.parametrize(
    "name", ["2x4", "1x1", "pp2-dp2-tp2", "rep2-dp2-cp2-tp1", "pp4-rep2-dp2-cp2-tp8"]
)
def test_the_flags_of_a_layout(name):
    flags = layout_flags(name)
    given = dict(zip(flags[::2], map(int, flags[1::2]), strict=True))
    sizes = parse_layout(name)
    assert given.pop("--dp-replicate") == sizes["dp_replicate"]
    assert given == {f"--{dim}": sizes[dim] for dim in ("pp", "cp", "tp")}
    assert "--dp" not in flags and math.prod(sizes.values()) % math.prod(given.values()) == 0
    with pytest.raises(LayoutError):
        layout_flags(name + "x2")


REFUSED = {
    "tp does not divide": (["--nodes", "2", "--", "--tp", "3"], "--tp 3 does not divide the 16"),
    "too few ranks": (["--layouts", "2x2", "--"], "--layouts 2x2 has 4 ranks, and --nodes 1 of 8"),
    "tp of a layout": (["--layouts", "1x8", "--", "--intermediate-size", "700"], "--tp 8"),
    "no nodes": (["--nodes", "0"], "--nodes: '0' is not a positive whole number"),
    "no processes": (["--gpus-per-node", "0"], "--gpus-per-node 0 starts no process"),
    "interactive array": (["--layouts", "1x8", "--interactive"], "leave out --interactive"),
    "own option": (["--sbatch", "nodes=3"], "--sbatch nodes is set here: use --nodes"),
    "no value": (["--sbatch", "time"], "--sbatch time: write time=VALUE"),
    "unknown option": (["--node", "3"], "unrecognized arguments: --node 3"),
    "unknown site": (["--site", "nowhere.toml"], "--site nowhere.toml: "),
    "a size of a layout": (["--layouts", "1x8", "--", "--tp=8"], "--tp is set for each of"),
    "a layout twice": (["--layouts", "1x8", "dp1-tp8"], "has one more than once"),
    "a plan": (["--", "--print-plan"], "--print-plan needs no job"),
    "an empty name": (["--sbatch", "job-name="], "--sbatch job-name '' names no file"),
    "a name with a folder": (["--sbatch", "job-name=a/b"], "--sbatch job-name 'a/b'"),
    "no name": (["--", "--run-dir", "/"], "--sbatch job-name '' names no file"),
    "two lines": (["--sbatch", "comment=a\nb"], "is no option of sbatch"),
    "dashes": (["--sbatch", "--mem=3"], "expected at least one argument"),
    "fewer than no GPUs": (["--gpus-per-node", "-1"], "--gpus-per-node -1 must be 0 or more"),
}


@pytest.mark.parametrize(("words", "text"), REFUSED.values(), ids=REFUSED)
def test_refusals(words, text, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert text in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("acount = 'x'", "unknown key 'acount'"),
        ("activate = 'no/such'", "there is no file"),
        ("[sbatch", "site.toml: "),
        ("modules = 3", "modules"),
        ("[env]\nMY-VAR = '1'", "'MY-VAR' is no name of a variable"),
        ("[env]\nWANDB_API_KEY = 'very'", "env: WANDB_API_KEY is a secret: "),
        ("[env]\nHTTPS_PROXY = 'http://me:very@proxy:80'", "env: HTTPS_PROXY is a secret: "),
        ("container_image = 'docker://me:very@registry/x'", "container_image holds a password"),
        ("[sbatch]\nexport = 'ALL,HF_TOKEN=very'", "--sbatch export holds a secret: "),
    ],
)
def test_a_site_file_that_is_wrong(text, fault, capsys, tmp_path):
    file = tmp_path / "site.toml"
    file.write_text(text)
    assert main(["--site", str(file), "--", "--tp", "2"]) == 2
    said = capsys.readouterr().err
    assert fault in said and "very" not in said


def test_no_secret_is_in_what_is_written(capsys):
    """Neither in the script nor in what refuses it; a name alone is the environment's."""
    text = render(capsys, "--sbatch", "export=ALL,WANDB_API_KEY", "--", "--tp", "2")
    assert "#SBATCH --export=ALL,WANDB_API_KEY\n" in text
    for words in (["--sbatch", "comment=WANDB_API_KEY=very"], ["--wandb-api-key", "very"]):
        assert main([*words, "--", "--tp", "2"]) == 2
        said = capsys.readouterr()
        assert "very" not in said.err + said.out and said.err.count("\n") == 1


def test_an_installed_copy_says_that_a_job_needs_the_repository(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("launch.slurm.__main__.HERE", tmp_path / "site-packages/launch/slurm")
    assert main(["--", "--tp", "2"]) == 2
    assert "installed copy in" in (said := capsys.readouterr().err) and said.count("\n") == 1
    (tmp_path / "launch").mkdir()
    script = shutil.copy(REPO / "launch/torchrun_multinode.sh", tmp_path / "launch")
    done = subprocess.run(["bash", script, "1", "0", "x", "y"], capture_output=True, text=True)
    assert done.returncode == 2 and "installed copy in" in done.stderr


def test_what_is_installed_is_complete(tmp_path):
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "train_llm" in settings["py-modules"]
    # What has __init__.py, and does not lie about in a checkout as a virtual environment does.
    folders = [p.parent for pattern in ("*", "*/*") for p in REPO.glob(f"{pattern}/__init__.py")]
    names = {folder: folder.relative_to(REPO).parts[0] for folder in folders}
    code = {f for f, top in names.items() if top not in ("tests", "benchmarks") and top[0] != "."}
    packages = find_packages(str(REPO), include=settings["packages"]["find"]["include"])
    assert {str(p.relative_to(REPO)).replace("/", ".") for p in code} == set(packages)
    for folder in code:
        wanted = [p for p in folder.iterdir() if p.suffix in (".toml", ".sh", ".sbatch")]
        patterns = settings["package-data"].get(str(folder.relative_to(REPO)).replace("/", "."), [])
        missed = [p for p in wanted if not any(p.match(pattern) for pattern in patterns)]
        assert [p.name for p in missed] in ([], ["site.toml"])


def test_what_is_pasted_on_several_lines_stays_a_comment(capsys, tmp_path):
    rope = '{"rope_type": "llama3", "factor": 8.0,\n "low_freq_factor": 1.0, '
    rope += '"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}'
    text = render(capsys, "--", "--tp", "2", "--rope-scaling", rope)
    assert text.splitlines()[2].startswith("#SBATCH ")
    # The flag arrives as it was.
    code = text[text.index("flags=(") : text.index("srun_options=")] + 'printf "%s" "${flags[3]}"'
    assert subprocess.check_output(["bash", "-c", code], text=True) == rope


def test_options_may_be_repeated(capsys):
    text = render(capsys, "--sbatch", "time=1:00", "--sbatch", "no-requeue=", "--", "--tp", "2")
    assert "#SBATCH --time=1:00\n" in text and "#SBATCH --no-requeue\n" in text
    assert "#SBATCH --requeue" not in text


def test_the_preflight_has_its_own_options(capsys):
    text = render(capsys, "--preflight", "--", "--preflight-mib", "1", "--tp", "2")
    assert '"$master" -m launch.preflight "${flags[@]}"' in text and 'train_llm.py "' not in text
    assert "flags=(--preflight-mib 1 --tp 2)" in text
    assert "#SBATCH --job-name=preflight-debug\n" in text


def test_it_runs_in_the_repository_only(capsys, monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["--", "--tp", "2"]) == 2
    assert f"cd {tmp_path}" in capsys.readouterr().err


STUB = """#!/bin/bash
echo "$(basename "$0") $*" >> {log}
{body}
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Run the one-node template's commands with programs of Slurm that write down their call.

    Returns:
        A function of environment and bodies of programs; exit code, stdout with stderr, calls.
    """

    def run(environ: dict, **bodies: str) -> tuple[int, str, str]:
        programs, log = tmp_path / "bin", tmp_path / "calls"
        programs.mkdir(exist_ok=True)
        log.write_text("")
        names = {"srun": "", "squeue": "echo RUNNING", "scancel": "", "scontrol": "echo n1"}
        for name, body in (names | bodies).items():
            (programs / name).write_text(STUB.format(log=log, body=body))
            (programs / name).chmod(0o755)
        base = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_NAME": "it"}
        base |= {"SLURM_JOB_ID": "24007", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
        (tmp_path / "launch").mkdir(exist_ok=True)
        if not (tmp_path / "launch/slurm").exists():
            (tmp_path / "launch/slurm").symlink_to(REPO / "launch/slurm")
        done = subprocess.run(
            ["bash", REPO / "launch/slurm/train.sbatch", "--tp", "2"],
            cwd=tmp_path,
            env=base | environ,
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done.returncode, done.stdout + done.stderr, log.read_text()

    return run


@needs_slurm
@pytest.mark.parametrize(
    ("nodes", "master"),
    [
        ("linux[1,2]", "linux1"),
        ("gpu-a[001-003,7]", "gpu-a001"),
        ("jean-zay-ia810", "jean-zay-ia810"),
        ("alpha,beta", "alpha"),
        ("gpu-b[001-512]", "gpu-b001"),
        ("r[3-4]n[08-11]", "r3n08"),
    ],
)
def test_the_master_is_the_first_node(nodes, master, job, cluster):
    real = shutil.which("scontrol")
    environ = {"SLURM_JOB_NODELIST": nodes, "SLURM_CONF": cluster["SLURM_CONF"]}
    code, output, calls = job(environ, scontrol=f'exec {real} "$@"')
    assert code == 0, output
    assert f" node {master}:20007 train_llm.py --tp 2 --run-dir runs/it" in calls


def test_without_scontrol_it_says_so(job):
    code, output, calls = job({}, scontrol="exit 1")
    assert code == 1 and "scontrol cannot list the nodes of this job (n[1-2])" in output
    assert "srun" not in calls


def status(state: str, time: int = 2, job: int = 24007, **fields) -> str:
    """What a start of ``job`` leaves."""
    text = json.dumps({"state": state, "time": time, "host": "n1", **fields}, indent=1)
    starts = json.dumps({"starts": [{"launch": [f"job {job}", "run x"]}]}, indent=1)
    return (
        f"mkdir -p runs/it; cat > runs/it/status.json << 'END'\n{text}\nEND\n"
        f"cat > runs/it/run.json << 'END'\n{starts}\nEND"
    )


ENDS = {
    "stopped": (status("stopped", step=7), True),
    "finished": (status("finished", step=9), False),
    "failed": (status("failed", step=7, error='"state": "stopped" "step": 8,') + "\nexit 1", False),
    "killed": (status("running") + "\nexit 137", False),
    "stopped without progress": (status("stopped", step=5), False),
    "ended before it began": ("exit 2", False),
    "another job's": (status("stopped", step=9, job=24) + "\nexit 2", False),
}


@pytest.mark.parametrize(("ending", "requeued"), ENDS.values(), ids=ENDS)
def test_what_is_requeued(ending, requeued, job, tmp_path):
    """The run has been stopped at step 5 by an earlier start."""
    subprocess.run(["bash", "-c", status("stopped", time=1, step=5)], cwd=tmp_path, check=True)
    code, output, calls = job({"ENVIRONMENT": "BATCH"}, srun=ending)
    assert ("scontrol requeue 24007" in calls) == requeued, output
    assert ("is requeued" in output) == requeued
    assert ("not requeued: " in output) == (not requeued and '"stopped"' in ending)
    assert code == (int(ending.split()[-1]) if ending[-1].isdigit() else 0)


def test_a_cancelled_job_is_not_requeued(job):
    ending = status("stopped", step=7)
    _, _, calls = job({"ENVIRONMENT": "BATCH"}, srun=ending, squeue="echo COMPLETING")
    assert "requeue" not in calls
    array = {"ENVIRONMENT": "BATCH", "SLURM_ARRAY_JOB_ID": "24000", "SLURM_ARRAY_TASK_ID": "3"}
    _, _, calls = job(array, srun=status("stopped", time=3, step=8))
    assert "scontrol requeue 24000_3" in calls, "24000 would be all tasks"


def test_a_job_that_may_not_be_requeued_says_so(job):
    ending = status("stopped", step=7)
    body = "[ $1 = show ] && echo n1"
    code, output, _ = job({"ENVIRONMENT": "BATCH"}, srun=ending, scontrol=body)
    assert code == 0 and "job 24007 cannot be requeued: submit it again" in output


def test_a_signal_at_any_time_reaches_the_ranks(job):
    """Before there is a step, and where the controller does not answer the first time."""
    signalled = "kill -USR1 $PPID; sleep 0.2; echo n1"
    waits = "for _ in $(seq 100); do sleep 0.1; [ -e told ] && break; done; rm told\n"
    deaf = "[ -e asked ] && touch told; touch asked; exit 1"
    code, output, calls = job(
        {"ENVIRONMENT": "BATCH"},
        scontrol=f'[ "$1" = requeue ] || {{ {signalled}; }}',
        srun=waits + status("stopped", step=7),
        scancel=deaf,
    )
    assert calls.count("scancel --signal=USR1 24007") >= 2
    assert code == 0 and "scontrol requeue 24007" in calls, output


def test_an_interactive_allocation_is_not_requeued(job):
    _, _, calls = job({}, srun=status("stopped", step=7))
    assert "srun" in calls and "requeue" not in calls


def wait_for(condition, seconds: float, what) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.3)


@needs_slurm
def test_two_nodes_stop_are_requeued_and_finish(slurm, repo):
    """One curve, one wandb run, beside a job array on the same nodes and plain srun."""
    steps, options = 40, ["--sbatch", "cpus-per-task=1", "time=10:00"]
    submit = [sys.executable, "-m", "launch.slurm", *options, "--submit"]
    run_dir, metrics = repo / "runs" / "two", repo / "runs" / "two" / "metrics.jsonl"
    flags = ["--recipe", "debug", "--tp", "2", "--steps", steps, "--log-every", 1]
    flags += ["--eval-every", 0, "--checkpoint-every", 0, "--wandb", "offline"]
    job = slurm(*submit, "--nodes", 2, "--gpus-per-node", 1, "--", *flags, "--run-dir", "runs/two")
    job = job.split()[-1]

    def log() -> str:
        said = [f"{p}:\n{p.read_text()}" for p in repo.glob("*.out")]
        return "\n".join(
            [slurm("scontrol", "show", "job", job), slurm("squeue", "--states=all"), *said]
        )

    def state(number: str = job) -> str:
        return slurm("squeue", "--noheader", f"--job={number}", "--format=%T", "--states=all")

    wait_for(lambda: metrics.exists() and len(rows(run_dir)) >= 3, 90, log)
    # To the batch shell, as Slurm itself does before the time limit.
    slurm("scancel", "--signal=USR1", "--batch", job)
    layouts = ["--layouts", "1x2", "2x1", "--gpus-per-node", 2]
    array = slurm(*submit, *layouts, "--", *SMALL, "--steps", 5, "--run-dir", "runs/array")
    array = array.split()[-1]
    wait_for(lambda: "PENDING" in state(), 60, log)
    first = len(rows(run_dir))
    assert 3 <= first < steps

    # A node that ended it in this second takes its next start for the one that is over.
    time.sleep(5)

    def restarted() -> bool:
        # It would wait for two minutes, counted anew if it starts while a node still cleans up.
        if "PENDING" in state():
            slurm("scontrol", "update", f"JobId={job}", "StartTime=now", fails=True)
        return len(rows(run_dir)) > first

    wait_for(restarted, 120, log)

    plain = [sys.executable, "train_llm.py", *SMALL, "--steps", 2, "--run-dir", "runs/plain"]
    said = slurm("srun", "--nodes=2", "--ntasks-per-node=1", *plain, "--tp", 2)
    assert said.count("finished at step 2") == 1
    wait_for(lambda: "COMPLETED" in state(), 180, log)

    assert [row["step"] for row in rows(run_dir)] == list(range(1, steps + 1))
    starts = json.loads((run_dir / "run.json").read_text())["starts"]
    assert [set(start["hosts"]) for start in starts] == [{"gpu-a1", "gpu-a2"}] * 2
    text = log()
    assert f"runs/two stopped at step {first}: job {job} is requeued" in text
    assert text.count(f"resumed from runs/two/checkpoints/step-{first:08d}") == 1
    assert f"finished at step {steps}" in text, "the log of the first start is kept, too"
    assert "Restarts=1" in slurm("scontrol", "show", "job", job)
    sent = read_wandb(run_dir)
    assert len(set(sent.ids)) == 1
    assert sorted(r["step"] for r in sent.rows if "loss" in r) == list(range(1, steps + 1))

    wait_for(lambda: state(array).split() == ["COMPLETED"] * 2, 60, log)
    comparison = json.loads((repo / "runs/array/comparison.json").read_text())
    assert {entry["label"] for entry in comparison["layouts"]} == {"1x2", "2x1"}
    assert (repo / "runs/array/loss_curves.png").stat().st_size > 10_000


@needs_slurm
@pytest.mark.parametrize("nodes", [1, 2, 512])
def test_slurm_would_take_the_script(nodes, slurm, tmp_path):
    large = nodes > 2
    words = ["--nodes", nodes, "--gpus-per-node", 8 if large else 4, "--sbatch", "cpus-per-task=1"]
    words += ["partition=large"] if large else []
    flags = ["--recipe", "llama3_405b"] if large else ["--recipe", "debug", "--tp", "2"]
    script = tmp_path / "job.sbatch"
    script.write_text(slurm(sys.executable, "-m", "launch.slurm", *words, "--", *flags))
    said = slurm("sbatch", "--test-only", script, fails=True)
    assert "to start at" in said and ("gpu-b[001-512]" if large else "gpu-a") in said
