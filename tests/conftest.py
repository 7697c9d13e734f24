"""Process groups shared by the whole test session."""

import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"

from tests.ranks import Group


def _group(world_size: int):
    @pytest.fixture(scope="session", name=f"ranks{world_size}")
    def fixture():
        group = Group(world_size)
        yield group
        group.close()

    return fixture


ranks1, ranks2, ranks4, ranks8 = map(_group, (1, 2, 4, 8))
