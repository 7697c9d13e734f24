"""Checkpoints: what is in them on any layout, what a save costs, damage, and what is never run."""

import gc
import json
import math
import os
import pickle
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from parallel.layout import parse_layout
from tests.ranks import Group, free_port
from tests.runs import SMALL, checkpoint_tensors, curve, run_main, train
from tests.toy import make_model, make_ranks
from training.checkpoint import dcp_files as checkpoint_files
from training.checkpoint.dcp_files import CheckpointReader, CheckpointWriter, find_fault
from training.checkpoint.folder import DamageError, file_sum, read_sums, write_sums
from training.checkpoint.saver import (
    Checkpointer,
    CheckpointError,
    Contents,
    TrainState,
    load_checkpoint,
)
from training.config.schema import OptimizerSection, RunSection
from training.optimizers.sharded import ShardedOptimizer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def toy(tp: int, folder: Path, reports: list, **options):
    """A toy model with its checkpointer: (model, optimizer, progress, checkpointer)."""
    ranks = make_ranks(tp)
    model = make_model(ranks, **options.pop("model", {}))
    optimizer = ShardedOptimizer(model, OptimizerSection())
    progress = TrainState(step=1)
    started_from = options.pop("started_from", None)
    config = RunSection(comm_timeout=60, **options)
    contents, more = Contents(model, optimizer, progress, ranks), {"report": reports.append}
    checkpointer = Checkpointer(
        folder, contents, config, identity={"seed": 0}, started_from=started_from, **more
    )
    return model, optimizer, progress, checkpointer


def fill(model, optimizer, value: float) -> None:
    """Set every weight and moment of this rank to one number."""
    with torch.no_grad():
        for tensor in [*optimizer.shards, *optimizer.named_state().values()]:
            getattr(tensor, "_local_tensor", tensor).fill_(value)


# Across layouts


def resaved(argv: list[str], port: int, folder: Path):
    """Run train_llm.main(), which writes what it has loaded to ``folder`` before it trains."""
    import training.loop

    def save_first(engine, batches, data, state, config, *more):
        contents = Contents(engine.model, engine.optimizer, state, engine.ranks)
        with Checkpointer(folder, contents, config.run, identity={}) as checkpointer:
            checkpointer.finish()
        return real(engine, batches, data, state, config, *more)

    real = training.loop.train
    with mock.patch("training.loop.train", save_first):
        return run_main(argv, port)


BATCH24 = ["--global-batch-size", 24, "--dtype", "float64", "--eval-every", 0]


@pytest.fixture(scope="module")
def saved_2x4(launched8, tmp_path_factory):
    """Five steps at 2x4 without a stop, and the same cut off after four, to be continued."""
    base = tmp_path_factory.mktemp("saved")
    flags = ["--num-attention-heads", 8, "--tp", 4, *BATCH24, "--checkpoint-every", 4]
    train(launched8, base / "straight", *flags, "--steps", 5)
    shutil.copytree(base / "straight", base / "half")
    shutil.rmtree(base / "half/checkpoints/step-00000005")
    return base


@pytest.fixture(scope="module")
def launched3():
    group = Group(3, process_group=False)
    yield group
    group.close()


LAYOUTS = ["4x2", "8x1", "1x8", "1x1", "3x1", "2x4", "rep2-dp2-tp2", "dp2-cp2-tp1", "pp2-dp1-tp2"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_the_same_on_every_layout(layout, saved_2x4, fresh, request, tmp_path):
    """Weights and moments bit for bit; the next step's loss to rounding, or to the bit."""
    sizes = parse_layout(layout)
    tp, replicas = sizes["tp"], sizes["dp_replicate"]
    world_size = math.prod(sizes.values())
    if layout[0] in "prd":
        group = fresh(world_size)
    else:
        group = request.getfixturevalue(f"launched{world_size}")
    shutil.copytree(saved_2x4 / "half", tmp_path / "run")
    argv = [*SMALL, "--run-dir", tmp_path / "run", "--num-attention-heads", 8, "--tp", tp]
    argv += ["--dp-replicate", replicas, "--cp", sizes["cp"], "--pp", sizes["pp"]]
    argv = [str(x) for x in [*argv, *BATCH24, "--steps", 5]]
    results = group.run(resaved, argv, free_port(), tmp_path / "again")
    assert {code for code, _ in results} == {0}
    found = checkpoint_tensors(tmp_path / "again/step-00000004")
    expected = checkpoint_tensors(saved_2x4 / "half/checkpoints/step-00000004")
    assert found.keys() == expected.keys() and len(found) == 21 * 4
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(expected[name].any() for name in expected)
    here, there = curve(tmp_path / "run"), curve(saved_2x4 / "straight")
    assert [row[0] for row in here] == [1, 2, 3, 4, 5]
    assert here[4] == (there[4] if layout == "2x4" else pytest.approx(there[4], rel=1e-12))


def reload(folder: Path, tp: int, rep: int, zero: int) -> list[bool]:
    """Whether this rank's parts of weights and moments are 1 after loading, and were not before."""
    ranks = make_ranks(tp, rep=rep, zero=zero)
    model = make_model(ranks, zero=zero)
    optimizer = ShardedOptimizer(model, OptimizerSection())

    def ones() -> bool:
        tensors = [*optimizer.shards, *optimizer.named_state().values()]
        return all((getattr(t, "_local_tensor", t) == 1).all() for t in tensors)

    before = ones()
    load_checkpoint(folder / "step-00000001", Contents(model, optimizer, TrainState(), ranks))
    return [before, ones()]


def save_replicated(folder: Path, tp: int, rep: int, zero: int) -> None:
    ranks = make_ranks(tp, rep=rep, zero=zero)
    model = make_model(ranks, zero=zero)
    optimizer = ShardedOptimizer(model, OptimizerSection())
    fill(model, optimizer, 1.0)
    config = RunSection(comm_timeout=60)
    contents = Contents(model, optimizer, TrainState(step=1), ranks)
    with Checkpointer(folder, contents, config, identity={}) as saver:
        saver.save()


STAGES = [(2, 2, 3), (1, 4, 2), (1, 1, 0), (2, 1, 1), (2, 1, 0)]


@pytest.mark.parametrize("tp, rep, zero", STAGES)
def test_replicas_and_stages_share_checkpoints(tp, rep, zero, ranks8, ranks4, tmp_path):
    """Written with replicas on eight ranks, read without on four, and the other way round."""
    ranks8.run(save_replicated, tmp_path / "a", tp, rep, zero)
    assert ranks4.run(reload, tmp_path / "a", 2, 1, 3) == [[False, True]] * 4
    ranks4.run(save_replicated, tmp_path / "b", 2, 1, 3)
    assert ranks8.run(reload, tmp_path / "b", tp, rep, zero) == [[False, True]] * 8
    # Each replicated shard is written by one of its ranks.
    sizes = [
        sum(f.stat().st_size for f in (tmp_path / x / "step-00000001").glob("*.distcp"))
        for x in ("a", "b")
    ]
    assert sizes[0] < 1.5 * sizes[1]


# Saving


def save_and_change(folder: Path, background: bool) -> bool:
    """Whether a save returned while its files were still being written."""
    reports = []
    model, optimizer, progress, saver = toy(2, folder, reports, async_checkpoint=background)
    fill(model, optimizer, 1.0)
    real = CheckpointWriter.write_data

    def slow(self, plan, planner):
        time.sleep(0.5)
        return real(self, plan, planner)

    with mock.patch.object(CheckpointWriter, "write_data", slow), saver:
        saver.save()
        early = not Path(folder, "step-00000001").exists()
        fill(model, optimizer, 2.0)
        progress.step, progress.tokens = 2, 99
    assert reports == [] and saver.saved_step == 1
    return early


@pytest.mark.parametrize("background", [True, False])
def test_a_save_holds_the_step_it_was_asked_for(background, ranks4, tmp_path):
    """Also where the weights change while it is being written."""
    early = ranks4.run(save_and_change, tmp_path, background)
    assert early == [background] * 4
    tensors = checkpoint_tensors(tmp_path / "step-00000001")
    assert len(tensors) == 21 * 4 and all((t == 1).all() for t in tensors.values())
    assert '"step": 1' in (tmp_path / "step-00000001/state.json").read_text()
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=tmp_path / "step-00000001").returncode == 0
    assert names(tmp_path) == ["step-00000001"]


def count_in_flight(folder: Path) -> int:
    """The most saves that were being written at once, over five of them."""
    _, _, progress, saver = toy(2, folder, [], keep_checkpoints=0)
    real, now, most = CheckpointWriter.write_data, [], []

    def counted(self, plan, planner):
        now.append(self)
        most.append(len(now))
        time.sleep(0.05)
        result = real(self, plan, planner)
        now.remove(self)
        return result

    with mock.patch.object(CheckpointWriter, "write_data", counted), saver:
        for progress.step in range(1, 6):
            saver.save()
            saver.save()  # of a step that is being saved: nothing to do
    return max(most) + 100 * len(most)


def test_one_save_is_in_flight(ranks2, tmp_path):
    assert ranks2.run(count_in_flight, tmp_path) == [501, 501]
    assert names(tmp_path) == [f"step-0000000{i}" for i in range(1, 6)]


def grow(folder: Path, saves: int) -> float:
    """Growth of this process's memory over some saves, in sizes of its own state."""

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    big = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 512}
    options = {"dtype": "float32", **big}
    model, optimizer, progress, saver = toy(1, folder, [], keep_checkpoints=1, model=options)
    fill(model, optimizer, 1.0)
    tensors = [*optimizer.shards, *optimizer.named_state().values()]
    local = [getattr(t, "_local_tensor", t) for t in tensors]
    size = sum(t.numel() * t.element_size() for t in local)
    assert size > 2 * 10**7
    # What DCP imports for its first save is not memory per save.
    scrap = toy(1, folder / "scrap", [])[3]
    scrap.finish()
    del scrap
    before, most = resident(), 0
    with saver:
        for progress.step in range(1, saves + 1):
            saver.save()
            most = max(most, resident() - before)
    return max(most, resident() - before) / size


def test_fifty_saves_cost_one_copy(ranks1, tmp_path):
    (growth,) = ranks1.run(grow, tmp_path, 50)
    assert growth < 1.5
    assert names(tmp_path) == ["scrap", "step-00000050"]


def fail_and_retry(folder: Path, background: bool) -> tuple:
    """Three saves and the last step's; the first two have no folder to go to."""
    reports = []
    _, _, progress, saver = toy(2, folder, reports, async_checkpoint=background)
    ranks = make_ranks(2)
    with saver:
        saver.save()
        progress.step = 2
        saver.save()
        try:
            saver.finish()
        except CheckpointError as error:
            reports.append(repr(error))
        dist.barrier(ranks.control)
        if ranks.rank == 0:
            folder.unlink()
            folder.mkdir()
        dist.barrier(ranks.control)
        progress.step = 3
        saver.save()
        progress.step = 4
        saver.finish()
        assert saver.saved_step == 4 and saver.fault is None
    return tuple(reports)


@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_fails_is_reported_and_tried_again(background, ranks4, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.touch()
    (found,) = set(ranks4.run(fail_and_retry, folder, background))
    *faults, recovered = found
    assert recovered is None and any("CheckpointError" in fault for fault in faults)
    assert "step-00000001 cannot be written: NotADirectoryError" in faults[0]
    assert all("cannot be written: NotADirectoryError" in fault for fault in faults)
    assert names(folder) == ["step-00000003", "step-00000004"]


def prune(folder: Path, first: Path, keep: int) -> None:
    _, _, progress, saver = toy(2, folder, [], started_from=first, keep_checkpoints=keep)
    with saver:
        for progress.step in range(2, 6):
            saver.save()


@pytest.mark.parametrize("keep, kept", [(1, [5]), (2, [4, 5]), (0, [2, 3, 4, 5])])
def test_what_is_kept(keep, kept, ranks2, tmp_path):
    """Strays are neither counted nor touched, and the one started from stays."""
    first = tmp_path / "step-00000001"
    ranks2.run(save_and_change, tmp_path, False)
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-100-old").mkdir()
    (tmp_path / "latest.tmp").touch()
    ranks2.run(prune, tmp_path, first, keep)
    expected = [f"step-0000000{i}" for i in (1, *kept)]
    assert names(tmp_path) == ["latest.tmp", *expected, "step-00000009", "step-100-old"]


def draw_and_restore(folder: Path) -> tuple[list[float], list[float]]:
    """What this rank draws after a save, and what it draws after loading it."""
    model, optimizer, progress, saver = toy(2, folder, [])
    torch.manual_seed(100 + make_ranks(2).rank)
    with saver:
        saver.save()
        first = torch.rand(3).tolist()
    torch.manual_seed(0)
    contents = Contents(model, optimizer, progress, make_ranks(2))
    load_checkpoint(folder / "step-00000001", contents)
    return first, torch.rand(3).tolist()


def load_as_on_a_gpu(folder: Path) -> int:
    """Resume where a state is asked for that the checkpoint does not hold."""
    model, optimizer, progress, _ = toy(2, folder, [])
    real = Contents.tensors

    def more(*args, **kwargs):
        state = real(*args, **kwargs)
        state["rng"]["rank-00000.cuda"] = torch.zeros(16, dtype=torch.uint8)
        return state

    with mock.patch.object(Contents, "tensors", more):
        contents = Contents(model, optimizer, progress, make_ranks(2))
        load_checkpoint(folder / "step-00000001", contents)
    return progress.step


def test_a_checkpoint_of_cpus_has_no_state_of_a_gpu(ranks4, tmp_path):
    ranks4.run(save_and_change, tmp_path, False)
    assert ranks4.run(load_as_on_a_gpu, tmp_path) == [1] * 4


def test_each_rank_gets_its_own_random_state_back(ranks4, tmp_path):
    found = ranks4.run(draw_and_restore, tmp_path)
    assert all(first == again for first, again in found)
    assert len({tuple(first) for first, _ in found}) == 4


# Damage


class Mark:
    """Unpickling it makes a file."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.distcp"))[0]


def truncate(folder: Path) -> None:
    os.truncate(shard(folder), shard(folder).stat().st_size - 100)


def flip(folder: Path, name: str | None = None) -> None:
    file = folder / name if name else shard(folder)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def shorten_sums(folder: Path) -> None:
    lines = (folder / "SHA256SUMS").read_text().splitlines(keepends=True)
    (folder / "SHA256SUMS").write_text("".join(lines[:-2]))


def rewrite(name: str, data: bytes) -> Callable[[Path], None]:
    """Other content of a file, with the right checksum, as somebody with intent would do it."""

    def damage(folder: Path) -> None:
        sums = read_sums(folder)
        (folder / name).write_bytes(data)
        write_sums(folder, sums | {name: file_sum(folder / name)})

    return damage


def plant(folder: Path) -> None:
    rewrite(".metadata", pickle.dumps(Mark(folder.parent / "marker")))(folder)


def state_with(**fields: str) -> Callable[[Path], None]:
    """Other JSON, spelled out, in some fields of state.json."""

    def damage(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        text = ", ".join(f'"{k}": {fields.get(k, json.dumps(v))}' for k, v in state.items())
        rewrite("state.json", f"{{{text}}}".encode())(folder)

    return damage


NORM = "model.model.norm.weight"


def forge(edit: Callable[[dcp.Metadata], None]) -> Callable[[Path], None]:
    """Other metadata."""

    def damage(folder: Path) -> None:
        metadata = dcp.FileSystemReader(folder).read_metadata()
        edit(metadata)
        rewrite(".metadata", pickle.dumps(metadata))(folder)

    return damage


def call_it_a_pickle(metadata: dcp.Metadata) -> None:
    metadata.state_dict_metadata[NORM] = dcp.metadata.BytesStorageMetadata()


def drop_a_shard(metadata: dcp.Metadata) -> None:
    del metadata.state_dict_metadata[NORM].chunks[0]


def repeat_a_shard(metadata: dcp.Metadata) -> None:
    chunks = metadata.state_dict_metadata[NORM].chunks
    chunks[-1] = chunks[0]


def place(**fields) -> Callable[[dcp.Metadata], None]:
    """Another place of a shard."""

    def edit(metadata: dcp.Metadata) -> None:
        key = next(key for key in metadata.storage_data if key.fqn == NORM)
        vars(metadata.storage_data[key]).update(fields)

    return edit


def resize(size: int) -> Callable[[dcp.Metadata], None]:
    def edit(metadata: dcp.Metadata) -> None:
        metadata.state_dict_metadata[NORM].size = torch.Size([size])

    return edit


def add_sum(line: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with (folder / "SHA256SUMS").open("a") as f:
            f.write(line + "\n")

    return damage


def replace_by_fifo(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def replace_by_link(folder: Path) -> None:
    """The same content, elsewhere."""
    shard(folder).rename(folder.parent / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(folder.parent / "elsewhere")


def grow_shard(folder: Path) -> None:
    os.truncate(shard(folder), 1 << 40)


# In pickle's own letters. A key whose hash takes 2**60 steps, a memo of 2**32 places, tuples of
# tuples that are too many for C's stack.
ENDLESS_KEY = (
    b"\x80\x04})"
    + b"\x94h\x00\x86\x94h\x01\x86"
    + b"".join(b"\x94h%c\x86" % (2 + i) for i in range(60))
    + b"K\x01s."
)
ENDLESS_NAME = b"\x80\x04\x8c\x13torch.serialization\x8c\x0b_get_layout\x93" + (
    ENDLESS_KEY[3:-4] + b"\x85R."
)


DAMAGE = {
    "shard truncated": (truncate, "__0_0.distcp differs from its checksum"),
    "shard empty": (lambda f: os.truncate(shard(f), 0), "__0_0.distcp differs"),
    "shard missing": (lambda f: shard(f).unlink(), "__0_0.distcp is missing"),
    "shard flipped": (flip, "__0_0.distcp differs from its checksum"),
    "metadata missing": (lambda f: (f / ".metadata").unlink(), ".metadata is missing"),
    "metadata flipped": (lambda f: flip(f, ".metadata"), ".metadata differs"),
    "state missing": (lambda f: (f / "state.json").unlink(), "state.json is missing"),
    "state flipped": (lambda f: flip(f, "state.json"), "state.json differs"),
    "sums missing": (lambda f: (f / "SHA256SUMS").unlink(), "SHA256SUMS is missing"),
    "sums flipped": (lambda f: flip(f, "SHA256SUMS"), ""),
    "sums shortened": (shorten_sums, "SHA256SUMS does not name"),
    "malicious metadata": (plant, ".metadata names posix.mkdir, which no checkpoint needs"),
    "malicious entry": (forge(call_it_a_pickle), "BytesStorageMetadata, which no checkpoint needs"),
    "endless key": (rewrite(".metadata", ENDLESS_KEY), ".metadata cannot be read (TypeError)"),
    "endless name": (rewrite(".metadata", ENDLESS_NAME), ".metadata cannot be read (TypeError)"),
    "huge memo": (rewrite(".metadata", b"\x80\x04)r\xff\xff\xff\xff."), "read (KeyError)"),
    "deep marks": (rewrite(".metadata", b"\x80\x04" + b"(" * 10**7), ".metadata is nested too"),
    "deep tuples": (
        rewrite(".metadata", b"\x80\x04})" + b"\x85" * 10**6 + b"K\x01s."),
        "cannot be read",
    ),
    "large metadata": (rewrite(".metadata", bytes(1 << 26)), ".metadata has more than the"),
    "shard not described": (forge(drop_a_shard), f"does not say where all of {NORM} is"),
    "shard described twice": (forge(repeat_a_shard), f"does not say where all of {NORM} is"),
    "huge tensor": (forge(resize(1 << 50)), f"does not say where all of {NORM} is"),
    "negative tensor": (forge(resize(-8)), f"does not say where all of {NORM} is"),
    "place outside": (forge(place(relative_path="../x.distcp")), "does not name ../x.distcp"),
    "place before": (forge(place(offset=-1)), "has a place that is none"),
    "place beyond": (forge(place(offset=1 << 40)), "_0.distcp has less than"),
    "place too long": (forge(place(length=1 << 40)), f"does not say where all of {NORM} is"),
    "place no number": (forge(place(length="9")), "has a place that is none"),
    "place unpacked": (forge(place(transform_descriptors=["zstd"])), "has a place that is none"),
    "sum of a device": (add_sum("0" * 64 + "  /dev/zero"), "names no file of it"),
    "sum outside": (add_sum("0" * 64 + "  ../../x"), "names no file of it"),
    "sum of a folder": (add_sum("0" * 64 + "  .."), "names no file of it"),
    "sum of letters": (add_sum("\x1b[2J" + "0" * 61 + "  x"), "\\x1b[2J000"),
    "sum twice": (add_sum("0" * 64 + "  .metadata"), "SHA256SUMS names .metadata twice"),
    "sum of a stranger": (add_sum("0" * 64 + "  core.7"), "SHA256SUMS names core.7, of which"),
    "sums a FIFO": (replace_by_fifo("SHA256SUMS"), "SHA256SUMS is no regular file"),
    "sums too large": (lambda f: os.truncate(f / "SHA256SUMS", 1 << 40), "SHA256SUMS has more"),
    "state a FIFO": (replace_by_fifo("state.json"), "state.json is no regular file"),
    "shard a FIFO": (replace_by_fifo("__0_0.distcp"), "__0_0.distcp is no regular file"),
    "shard a link": (replace_by_link, "__0_0.distcp is no regular file"),
    "shard too large": (grow_shard, "__0_0.distcp has more than the"),
    "state too large": (rewrite("state.json", b" " * (1 << 21)), "state.json has more than the"),
    "state nested": (rewrite("state.json", b"[" * 10**5 + b"]" * 10**5), "is no JSON"),
    "state a list": (rewrite("state.json", b"[1]"), "state.json is no object"),
    **{
        f"step {text}": (state_with(step=text), f"state.json has {said} as step")
        for text, said in {
            '"20"': "20",
            "NaN": "NaN",
            "-5": "-5",
            "1e400": "Infinity",
            "true": "true",
            "2.0": "2.0",
            "null": "null",
            str(2**70): str(2**70),
        }.items()
    },
    "no ranks": (state_with(world_size="0"), "state.json has 0 as world_size"),
    "identity a list": (state_with(identity="[]"), "is no object with an identity"),
}


def faults(folders: list[Path]) -> list[str | None]:
    return [find_fault(folder, make_ranks(2)) for folder in folders]


def test_every_damage_is_found_by_all_ranks(ranks4, tmp_path):
    ranks4.run(save_and_change, tmp_path / "good", False)
    folders = [tmp_path / "good/step-00000001"]
    for number, (damage, _) in enumerate(DAMAGE.values()):
        folders.append(tmp_path / f"damaged-{number}")
        shutil.copytree(folders[0], folders[-1])
        damage(folders[-1])
    folders.append(tmp_path / "step-00000002")
    shutil.copytree(folders[0], folders[-1])
    started = time.monotonic()
    found = ranks4.run(faults, folders)
    assert time.monotonic() - started < 60  # some seconds, on a quiet machine
    assert found == [found[0]] * 4
    assert "is of step 1, the folder's name is not" in found[0].pop()
    assert found[0][0] is None
    for (name, (_, expected)), fault in zip(DAMAGE.items(), found[0][1:], strict=True):
        assert fault and expected in fault, (name, fault)
    assert not (tmp_path / "marker").exists()


def test_the_planted_pickles_would_run(ranks2, tmp_path):
    """The test above would pass if they were harmless."""
    ranks2.run(save_and_change, tmp_path, False)
    folder = tmp_path / "step-00000001"
    plant(folder)
    with pytest.raises(DamageError):
        CheckpointReader(folder).read_metadata()
    assert not (tmp_path / "marker").exists()
    with pytest.raises(AttributeError):
        dcp.FileSystemReader(folder).read_metadata()
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("data", [b"", b"\x80\x05", b"garbage", pickle.dumps({"a": 1})])
def test_metadata_that_is_none(data, tmp_path):
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(DamageError, match="cannot be read"):
        CheckpointReader(tmp_path).read_metadata()


def files_read(folder: Path) -> list[str]:
    ranks, read = make_ranks(2), []

    def note(checkpoint, name, sums):
        read.append(name)

    with mock.patch.object(checkpoint_files, "check_file", note):
        assert find_fault(folder, ranks) is None
    return read


def test_each_rank_reads_its_share(ranks4, tmp_path):
    ranks4.run(save_and_change, tmp_path, False)
    read = ranks4.run(files_read, tmp_path / "step-00000001")
    everything = names(tmp_path / "step-00000001")
    everything.remove("SHA256SUMS")
    assert sorted(name for share in read for name in share) == everything and len(everything) == 6
    assert max(map(len, read)) == 2


def load_damaged(folder: Path) -> str:
    model, optimizer, progress, _ = toy(2, folder.parent, [])
    ranks = make_ranks(2)
    if ranks.rank == 3:
        flip(folder, "__1_0.distcp")
        truncate(folder)
    dist.barrier(ranks.control)
    try:
        load_checkpoint(folder, Contents(model, optimizer, progress, ranks))
    except CheckpointError as error:
        return str(error)


def test_damage_after_the_check_is_one_line_on_all_ranks(ranks4, tmp_path):
    """No rank is left waiting for one that could not read."""
    ranks4.run(save_and_change, tmp_path, False)
    started = time.monotonic()
    (found,) = set(ranks4.run(load_damaged, tmp_path / "step-00000001"))
    assert "step-00000001 cannot be read" in found and "\n" not in found
    assert time.monotonic() - started < 20
