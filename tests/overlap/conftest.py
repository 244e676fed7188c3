from collections.abc import Iterator

import pytest
from hypothesis import settings
from ranks import Ranks

settings.register_profile("ranks", deadline=None, derandomize=True, max_examples=12)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()
