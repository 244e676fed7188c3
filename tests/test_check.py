"""The table of `stretto check`: what it shows, and that its JSON is JSON."""

import json
import math

from stretto.check import Row, _plain, table


def test_what_could_not_be_compared_is_null_in_the_json():
    row = _plain(Row("retain", cosine=math.nan, relative_l2=math.inf, forwards=3.0, refused="why"))
    told = json.loads(json.dumps(row, allow_nan=False))
    assert (told["cosine"], told["relative_l2"], told["forwards"], told["refused"]) == (None, None, 3.0, "why")


def test_a_peak_that_could_not_be_seen_is_a_dash():
    unseen, none, seen = table([Row("a", peak_bytes=0), Row("b"), Row("c", peak_bytes=1_500_000)]).splitlines()[1:]
    assert (unseen.split()[-1], none.split()[-1], seen.split()[-1]) == ("-", "-", "1.5")
