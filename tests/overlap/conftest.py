from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The pool of the whole suite."""
    pool = Ranks()
    yield pool
    pool.close()
