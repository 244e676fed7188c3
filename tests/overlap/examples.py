"""How many drawn cases a test ships to the ranks: fewer where more ranks share the machine's cores."""

from hypothesis import Phase, settings


def few(num_ranks: int, most: int) -> settings:
    """For a parent that draws cases for `num_ranks` ranks; a failure is not shrunk, its world is dead."""
    return settings(
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=max(2, most * 3 // max(3, 2 * num_ranks - 3)),
        phases=[Phase.explicit, Phase.generate],
    )
