"""Rewards behind the rollout: the same numbers as at once, nothing lost, and the time shown."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from stretto.rewards import behind as behind_module
from stretto.rewards import load_reward
from stretto.rewards.behind import Scorer
from stretto.rewards.brightness import brightness
from stretto.rewards.failures import RewardError, SkippedGroup
from stretto.rewards.retries import Scoring
from stretto.rewards.scoring import score
from tests.rewards import misbehaving
from tests.rewards.misbehaving import Misbehaving, well

BATCHES = [torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
PROMPTS, NAMES = ["4", "4", "7"], ["0 of group 0", "1 of group 0", "0 of group 1"]
BOTH = pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind"])


def drawing(media, prompts):
    """Draws from every global generator, takes its time unevenly, and computes what rounding can see."""
    time.sleep(0.02 * random.random())
    products = media.flatten(1) @ torch.randn(64, 512) @ torch.randn(512, 64)
    return products.mean(1).double() + random.random() + torch.rand(3)


def last_of(media, prompts, style):
    return [float(len(text)) for text in style]


def all_scores(behind):
    torch.manual_seed(7)
    random.seed(7)
    with Scorer({"a": drawing, "b": brightness, "c": last_of}, behind=behind) as scorer:
        pending = []
        for batch in BATCHES:
            pending.append(scorer.submit(batch, PROMPTS, NAMES, {"style": ["x", "yy", "zzz"]}))
            torch.rand(3, generator=torch.Generator().manual_seed(1))  # ours draw from keyed generators alone
        return [each.result() for each in reversed(pending)][::-1]


def test_rewards_behind_are_bitwise_those_at_once_and_those_of_score():
    at_once, behind = all_scores(False), all_scores(True)
    torch.manual_seed(7)
    random.seed(7)
    plain = [
        score({"a": drawing, "b": brightness, "c": last_of}, batch, PROMPTS, NAMES, {"style": ["x", "yy", "zzz"]})
        for batch in BATCHES
    ]
    for one, two, three in zip(at_once, behind, plain):
        assert one.dtype == torch.float64
        assert one.shape == (3, 3)
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    assert not torch.equal(at_once[0], at_once[1])


@BOTH
def test_a_reward_sees_no_gradient_and_the_runs_number_of_threads(behind):
    seen = {}

    def look(media, prompts):
        media.mean()
        seen.update(grad=torch.is_grad_enabled(), threads=torch.get_num_threads(), on=threading.current_thread().name)
        return [0.0] * 3

    former = torch.get_num_threads()
    torch.set_num_threads(former + 1)
    try:
        with Scorer({"look": look}, behind=behind) as scorer, torch.enable_grad():
            media = BATCHES[0].clone().requires_grad_()
            assert not scorer.submit(media, PROMPTS, NAMES).result().requires_grad
    finally:
        torch.set_num_threads(former)
    assert seen["grad"] is False
    assert seen["threads"] == former + 1
    assert (seen["on"] == "stretto rewards") == behind


def test_what_waits_is_hidden_and_the_seconds_say_so():
    def waits(media, prompts):
        time.sleep(0.4)
        return [0.0] * 3

    seconds = {}
    for behind in (False, True):
        with Scorer({"waits": waits}, behind=behind) as scorer:
            pending = scorer.submit(BATCHES[0], PROMPTS, NAMES)
            time.sleep(0.8)  # the next rollout
            pending.result()
            seconds[behind] = scorer.take()
            assert scorer.take()["busy_s"] == 0.0
    assert seconds[False]["busy_s"] >= 0.4
    assert seconds[False]["waited_s"] >= seconds[False]["busy_s"]
    assert seconds[True]["busy_s"] >= 0.4
    assert seconds[True]["waited_s"] < 0.2


def test_the_caller_who_comes_too_early_is_charged():
    with Scorer({"waits": lambda media, prompts: time.sleep(0.2) or [0.0] * 3}, behind=True) as scorer:
        scorer.submit(BATCHES[0], PROMPTS, NAMES).result()
        assert scorer.take()["waited_s"] > 0.15


@BOTH
def test_a_failure_reaches_the_caller_who_asks_and_spares_the_others(behind):
    def picky(media, prompts):
        if media is BATCHES[1]:
            raise KeyError("no target")
        return [1.0, 2.0, 3.0]

    with Scorer({"picky": picky}, behind=behind) as scorer:
        pending = [scorer.submit(batch, PROMPTS, NAMES) for batch in BATCHES[:3]]
        assert pending[2].result().flatten().tolist() == [1.0, 2.0, 3.0]
        for _ in range(2):
            with pytest.raises(RewardError, match="raised KeyError"):
                pending[1].result()
        assert pending[0].result().flatten().tolist() == [1.0, 2.0, 3.0]


@BOTH
def test_a_failure_that_nobody_asked_for_is_raised_at_the_end(behind):
    scorer = Scorer({"broken": lambda media, prompts: 1 / 0}, behind=behind)
    scorer.submit(BATCHES[0], PROMPTS, NAMES)
    time.sleep(0.1)
    with pytest.raises(RewardError, match="ZeroDivisionError"), scorer:
        pass


@BOTH
def test_a_failure_at_the_end_does_not_hide_what_went_wrong_before(behind):
    scorer = Scorer({"broken": lambda media, prompts: 1 / 0}, behind=behind)
    scorer.submit(BATCHES[0], PROMPTS, NAMES)
    time.sleep(0.1)
    with pytest.raises(MemoryError), scorer:
        raise MemoryError


@BOTH
def test_an_interrupt_inside_a_reward_is_no_failed_reward(behind):
    def interrupts(media, prompts):
        raise KeyboardInterrupt

    with Scorer({"interrupts": interrupts}, behind=behind) as scorer, pytest.raises(KeyboardInterrupt):
        scorer.submit(BATCHES[0], PROMPTS, NAMES).result()


@BOTH
@pytest.mark.filterwarnings("ignore:reward .* attempt:UserWarning")
def test_a_skipped_batch_has_no_rewards_and_the_next_has(behind):
    scoring = Scoring(attempts=2, backoff_s=0.01, timeout_s=0.2, on_failure="skip")
    down = misbehaving.hangs_up
    with (
        Misbehaving(down, down, well(1, 2, 3)) as service,
        Scorer({service.address: load_reward(service.address)}, behind=behind, scoring=scoring) as scorer,
    ):
        first, second = scorer.submit(BATCHES[0], PROMPTS, NAMES), scorer.submit(BATCHES[1], PROMPTS, NAMES)
        with pytest.raises(SkippedGroup, match="2 of 2 attempts failed"):
            first.result()
        assert second.result().flatten().tolist() == [1, 2, 3]
        counts = scorer.take()
    assert (counts["failures"], counts["retries"], counts["skipped"]) == (2, 1, 1)
    assert counts["busy_s"] >= counts["lost_s"] > 0


def test_the_bound_of_an_attempt_is_the_recipes():
    with (
        Misbehaving(misbehaving.hangs) as service,
        Scorer(
            {"far": load_reward(service.address)}, behind=True, scoring=Scoring(attempts=1, timeout_s=0.2)
        ) as scorer,
        pytest.raises(RewardError, match=r"within 0\.2 s"),
    ):
        scorer.submit(BATCHES[0], PROMPTS, NAMES).result()


@pytest.mark.filterwarnings("ignore:reward .* attempt:UserWarning")
def test_ctrl_c_reaches_a_caller_who_waits_and_the_thread_ends():
    with Misbehaving(misbehaving.hangs_up) as service:
        reward = load_reward(service.address)
        started = time.monotonic()
        scorer = Scorer({"far": reward}, behind=True, scoring=Scoring(attempts=9, backoff_s=40.0))
        pending = scorer.submit(BATCHES[0], PROMPTS, NAMES)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt), scorer:
            pending.result()
        assert time.monotonic() - started < 5
        assert not scorer._thread.is_alive()


def scorer_that_waits():
    begun, go = threading.Event(), threading.Event()

    def waits(media, prompts):
        begun.set()
        return [0.0] * 3 if go.wait(5) else []

    return Scorer({"waits": waits}, behind=True), begun, go


def test_what_has_not_begun_is_dropped_when_the_scorer_closes_and_says_so():
    scorer, begun, go = scorer_that_waits()
    first, second = [scorer.submit(batch, PROMPTS, NAMES) for batch in BATCHES[:2]]
    assert begun.wait(5)
    threading.Timer(0.1, go.set).start()
    scorer.close()
    assert first.result().tolist() == [[0.0]] * 3
    with pytest.raises(RuntimeError, match="closed before these samples were scored"):
        second.result()
    with pytest.raises(RuntimeError, match="the scorer is closed"):
        scorer.submit(BATCHES[0], PROMPTS, NAMES)


def test_a_reward_that_does_not_end_is_left_and_said(monkeypatch):
    monkeypatch.setattr(behind_module, "CLOSING_S", 0.1)
    scorer, begun, go = scorer_that_waits()
    scorer.submit(BATCHES[0], PROMPTS, NAMES)
    assert begun.wait(5)
    with pytest.warns(UserWarning, match="a reward was still computing"):
        scorer.close()
    go.set()
    scorer._thread.join()


ENDS_INSIDE_TORCH = """
import sys, threading, time, torch
from stretto.rewards.behind import Scorer
begun = threading.Event()
def computes(media, prompts):
    begun.set()
    end = time.monotonic() + 1
    while time.monotonic() < end:
        torch.randn(300, 300) @ torch.randn(300, 300)
    return [0.0]
scorer = Scorer({"computes": computes}, behind=True)
scorer.submit(torch.zeros(1, 1, 2, 2), ["a"], ["0"])
begun.wait()
sys.exit(3)
"""


def test_a_process_that_ends_while_a_reward_computes_ends_as_it_meant_to():
    run = subprocess.run([sys.executable, "-c", ENDS_INSIDE_TORCH], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (3, "")


@BOTH
def test_media_go_when_they_are_scored(behind):
    with Scorer({"b": brightness}, behind=behind) as scorer:
        media = BATCHES[0].clone()
        gone = weakref.ref(media)
        pending = scorer.submit(media, PROMPTS, NAMES)
        pending.result()
        del media
        time.sleep(0.05)
        assert gone() is None


def test_a_scorer_that_is_never_used_starts_no_thread():
    with Scorer({"b": brightness}, behind=True) as scorer:
        assert scorer._thread is None
        assert scorer.take() == {
            "busy_s": 0.0,
            "waited_s": 0.0,
            "failures": 0,
            "retries": 0,
            "skipped": 0,
            "lost_s": 0.0,
        }


@pytest.mark.gpu
def test_on_a_gpu_the_thread_waits_for_the_media_and_not_for_what_comes_after():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    a = torch.randn(4096, 4096, device="cuda")
    with Scorer({"b": brightness}, behind=True) as scorer:
        scorer.submit(torch.rand(3, 1, 8, 8, device="cuda"), PROMPTS, NAMES).result()
        for _ in range(50):
            a = torch.nn.functional.normalize(a @ a)
        media = a[:3, :64].abs().reshape(3, 1, 8, 8).clone()
        pending = scorer.submit(media, PROMPTS, NAMES)
        for _ in range(400):
            a = torch.nn.functional.normalize(a @ a)
        done = torch.cuda.Event()
        done.record()
        found = pending.result()
        assert not done.query()
        torch.cuda.synchronize()
        assert torch.equal(found, score({"b": brightness}, media, PROMPTS, NAMES))
