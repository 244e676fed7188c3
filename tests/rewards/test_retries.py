"""Asking again: what is, how often, within which bound, and what is known when it was in vain."""

import threading
import time

import pytest
import torch

from stretto.rewards import load_reward
from stretto.rewards.failures import RewardError, ServiceError, SkippedGroup
from stretto.rewards.remote import RemoteReward
from stretto.rewards.retries import LONGEST_WAIT_S, Retries, Scoring
from stretto.rewards.scoring import score
from tests.rewards import misbehaving
from tests.rewards.misbehaving import Misbehaving, free_port, says, well

MEDIA = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS, NAMES = ["a", "b"], ["0 of group 0", "1 of group 0"]
QUICK = Scoring(attempts=4, backoff_s=0.02, timeout_s=0.3)
NONE = {"failures": 0, "retries": 0, "skipped": 0, "lost_s": 0.0}

pytestmark = pytest.mark.filterwarnings("ignore:reward .* attempt:UserWarning")


def asked(address, retries):
    reward = load_reward(address).within(retries.scoring.timeout_s)
    return score({"far": reward}, MEDIA, PROMPTS, NAMES, how=retries.ask).flatten().tolist()


FAULTS = {
    "slow": misbehaving.hangs,
    "dribbling": misbehaving.dribbles,
    "hanging up": misbehaving.hangs_up,
    "resetting": misbehaving.resets,
    "dying in the middle of an answer": says("200 OK", {"rewards": [1, 2]}, length=1000),
    "failing": says("500 Oh No", b"Traceback"),
    "overloaded": says("503 Busy", b""),
    "returning garbage": says("200 OK", b"<html>"),
    "returning too few": well(1),
    "returning a NaN": says("200 OK", b'{"rewards": [1, NaN]}'),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_service_that_fails_twice_and_then_is_well_gives_its_rewards(fault):
    retries = Retries(QUICK)
    with Misbehaving(fault, fault, well(1.5, -2.5)) as service:
        assert asked(service.address, retries) == [1.5, -2.5]
    counts = retries.take()
    assert len(service.bodies) == 3
    assert len(set(service.bodies)) == 1
    assert (counts["failures"], counts["retries"], counts["skipped"]) == (2, 2, 0)
    assert 0.03 <= counts["lost_s"] < 2 * 0.3 + 0.06 + 3
    assert retries.take() == NONE


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("on_failure", ["stop", "skip"])
def test_a_service_that_never_is_well_gives_an_error_within_the_bound_and_no_number(fault, on_failure):
    scoring = Scoring(attempts=3, backoff_s=0.02, timeout_s=0.2, on_failure=on_failure)
    retries = Retries(scoring)
    with Misbehaving(fault) as service:
        started = time.monotonic()
        with pytest.raises(RewardError, match="3 of 3 attempts failed; at the last the service") as raised:
            asked(service.address, retries)
        seconds = time.monotonic() - started
    assert seconds < scoring.bound_s + 3  # a busy machine's; any one of these faults would last for ever
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("reward 'far', samples 0 of group 0 to 1 of group 0: ")
    assert isinstance(raised.value, SkippedGroup) == (on_failure == "skip")
    assert isinstance(raised.value.__cause__, ServiceError)
    assert raised.value.value is None
    counts = retries.take()
    assert (counts["failures"], counts["retries"]) == (3, 2)
    assert counts["skipped"] == (on_failure == "skip")
    assert len(service.bodies) == 3


def test_a_refused_connection_is_asked_again_until_somebody_listens():
    port, retries = free_port(), Retries(Scoring(attempts=20, backoff_s=0.05, timeout_s=1.0))
    service = Misbehaving(well(3, 4), port=port)
    service._socket.close()

    def listen_later():
        time.sleep(0.2)
        service.__init__(well(3, 4), port=port)
        service.__enter__()

    later = threading.Thread(target=listen_later)
    later.start()
    try:
        assert asked(f"http://127.0.0.1:{port}/score", retries) == [3, 4]
    finally:
        later.join()
        service.__exit__()
    assert retries.take()["failures"] >= 2


class Waits(threading.Event):
    """An event that remembers how long it was waited for."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def wait(self, timeout=None):
        self.seconds.append(timeout)
        return super().wait(timeout)


def test_waits_double_and_stay_under_their_bound():
    scoring = Scoring(attempts=4, backoff_s=0.1, timeout_s=1.0)
    assert [scoring.longest_wait_s(failed) for failed in (1, 2, 3)] == [0.1, 0.2, 0.4]
    assert scoring.bound_s == pytest.approx(4 * 1.0 + 0.7)
    waits = Waits()
    with Misbehaving(misbehaving.hangs_up) as service, pytest.raises(RewardError):
        asked(service.address, Retries(scoring, waits))
    assert len(waits.seconds) == 3
    for seconds, longest in zip(waits.seconds, (0.1, 0.2, 0.4)):
        assert longest / 2 <= seconds <= longest
    for before, after, seconds in zip(service.times, service.times[1:], waits.seconds):
        assert after - before >= seconds * 0.95


def test_no_wait_is_longer_than_a_minute_however_many_attempts():
    scoring = Scoring(attempts=10_000, backoff_s=5.0, timeout_s=2.0)
    assert scoring.longest_wait_s(9_999) == LONGEST_WAIT_S
    assert scoring.bound_s < 10_000 * 62.0 + 1


def test_a_function_that_raises_is_not_asked_again():
    calls = []

    def broken(media, prompts):
        calls.append(len(prompts))
        raise ConnectionRefusedError("mine")

    retries = Retries(Scoring(attempts=5, backoff_s=9.0, on_failure="skip"))
    with pytest.raises(RewardError, match="the function raised ConnectionRefusedError: mine") as raised:
        score({"near": broken}, MEDIA, PROMPTS, NAMES, how=retries.ask)
    assert not isinstance(raised.value, SkippedGroup)
    assert calls == [2, 1]  # the batch, and the search for the sample
    assert retries.take() == NONE


def test_a_nan_of_a_function_is_not_asked_again():
    retries = Retries(Scoring(attempts=5, backoff_s=9.0, on_failure="skip"))
    with pytest.raises(RewardError, match="returned nan") as raised:
        score({"near": lambda media, prompts: [0.0, float("nan")]}, MEDIA, PROMPTS, NAMES, how=retries.ask)
    assert not isinstance(raised.value, SkippedGroup)


def test_a_reward_of_ones_own_that_asks_a_service_may_say_that_it_should_be_asked_again():
    left = [2]

    def flaky(media, prompts):
        if left[0]:
            left[0] -= 1
            raise ServiceError("was busy")
        return [1.0, 2.0]

    retries = Retries(QUICK)
    assert score({"mine": flaky}, MEDIA, PROMPTS, NAMES, how=retries.ask).flatten().tolist() == [1.0, 2.0]
    assert retries.take()["retries"] == 2


def test_without_retries_a_service_is_asked_once():
    with Misbehaving(misbehaving.hangs_up) as service:
        with pytest.raises(RewardError, match="the service broke the connection"):
            score({"far": RemoteReward(service.address, 1.0)}, MEDIA, PROMPTS, NAMES)
        assert len(service.times) == 1


def test_every_retry_is_said_in_one_line():
    with (
        Misbehaving(says("503 Busy", b""), well(1, 2)) as service,
        pytest.warns(
            UserWarning, match=r"reward 'far': attempt 1 of 4: the service answered 503 Busy; again in 0\.0 s"
        ),
    ):
        asked(service.address, Retries(QUICK))


def test_retries_move_no_generator():
    before = torch.get_rng_state()
    import random

    state = random.getstate()
    with Misbehaving(misbehaving.hangs_up, well(1, 2)) as service:
        asked(service.address, Retries(QUICK))
    assert torch.equal(before, torch.get_rng_state())
    assert state == random.getstate()


def test_a_wait_ends_when_the_run_does():
    stopping = threading.Event()
    retries = Retries(Scoring(attempts=2, backoff_s=30.0, timeout_s=1.0), stopping)
    threading.Timer(0.1, stopping.set).start()
    started = time.monotonic()
    with Misbehaving(misbehaving.hangs_up) as service, pytest.raises(RewardError, match="1 of 2 attempts failed"):
        asked(service.address, retries)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"attempts": 0}, "scoring.attempts = 0: take at least 1"),
        ({"backoff_s": -1.0}, "scoring.backoff_s = -1.0"),
        ({"backoff_s": float("inf")}, "scoring.backoff_s = inf"),
        ({"timeout_s": 0.0}, "scoring.timeout_s = 0.0"),
        ({"timeout_s": float("nan")}, "scoring.timeout_s = nan"),
        ({"on_failure": "guess"}, 'scoring.on_failure = \'guess\': take "stop" or "skip"'),
    ],
)
def test_settings_that_cannot_be_are_told_in_one_line(settings, told):
    with pytest.raises(ValueError, match=r"scoring\.") as raised:
        Scoring(**settings)
    assert told in str(raised.value)
