"""What several files of tests with ranks compare with."""

from pathlib import Path

import pytest

from tests.cluster.runs import train


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process."""
    return train(tmp_path_factory.mktemp("single"), "one", learners=0)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two plain processes to which nothing happens."""
    return train(tmp_path_factory.mktemp("undisturbed"), "two")
