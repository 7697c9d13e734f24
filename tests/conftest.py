"""Process groups shared by the whole test session."""

import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"

from tests.ranks import Group

OUTSIDE = ("SLURM_", "WANDB_", "MASTER_", "LOCAL_", "RANK", "WORLD_SIZE", "NETRC", "TORCHELASTIC_")


def pytest_addoption(parser):
    parser.addoption("--draws", type=int, default=24, help="layouts that test_property.py draws")
    parser.addoption("--draw-seed", type=int, default=0, help="seed of the first draw")


def _group(name: str, world_size: int, **options):
    @pytest.fixture(scope="session", name=name)
    def fixture():
        group = Group(world_size, **options)
        yield group
        group.close()

    return fixture


ranks1 = _group("ranks1", 1)
ranks2 = _group("ranks2", 2)
ranks4 = _group("ranks4", 4)
ranks8 = _group("ranks8", 8)
# Processes as a launcher starts them: train_llm.main() builds its own process group.
launched1 = _group("launched1", 1, process_group=False)
launched2 = _group("launched2", 2, process_group=False)
launched4 = _group("launched4", 4, process_group=False)
launched8 = _group("launched8", 8, process_group=False)


@pytest.fixture(scope="session", autouse=True)
def token_cache(tmp_path_factory):
    """One cache of tokenised text for the session, away from the user's."""
    os.environ["PARALLEL_RECIPES_CACHE"] = str(tmp_path_factory.mktemp("tokens"))


@pytest.fixture
def no_launcher(monkeypatch, tmp_path):
    """Nothing of the machine's launcher or wandb account decides a test; runs/ is in tmp_path."""
    for name in list(os.environ):
        if name.startswith(OUTSIDE):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fresh():
    """Make launched processes that have built no mesh before.

    DTensor remembers meshes that look equal, with the names of groups that are gone: in one process
    another set of dims, as no real one does, must not follow.
    """
    groups = []

    def make(world_size: int) -> Group:
        groups.append(Group(world_size, process_group=False))
        return groups[-1]

    yield make
    for group in groups:
        group.close()
