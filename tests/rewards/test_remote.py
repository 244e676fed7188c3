"""A reward that lives elsewhere: what goes over the wire, exactly, and what is believed of what comes back."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from stretto.rewards import load_reward
from stretto.rewards.brightness import brightness
from stretto.rewards.failures import RefusedError, RewardError, ServiceError
from stretto.rewards.remote import RemoteReward
from stretto.rewards.retries import Retries, Scoring
from stretto.rewards.scoring import score
from stretto.rewards.serve import RewardServer, main
from stretto.rewards.wire import pack, unpack
from tests.rewards import misbehaving
from tests.rewards.misbehaving import Misbehaving, free_port, says, well

MEDIA = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = ["4", "vier \u2014 \u56db", '7\n"quoted"']
NAMES = ["0 of group 0", "1 of group 0", "0 of group 1"]
COLUMNS = {"style": ["ink", None, "\u6c34"], "weight": [0.1, 1e300, -3], "tags": [["a"], [], {"b": 1}]}


@pytest.fixture
def served():
    """served(function): its address, on a thread, until the test ends."""
    servers = []

    def serve(function, name="mine"):
        servers.append(RewardServer(name, function, "127.0.0.1", 0))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1].address

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def ask_once(address, **metadata):
    return score({"far": load_reward(address)}, MEDIA, PROMPTS, NAMES, metadata)


@pytest.mark.parametrize("shape", [(3, 1, 8, 8), (2, 5, 3, 4, 6), (0, 3, 4, 4)])
def test_a_request_comes_out_as_it_went_in(shape):
    media = torch.rand(shape)
    prompts = PROMPTS[: len(media)]
    request = unpack(pack(media, prompts, COLUMNS))
    assert request.media.dtype == torch.float32
    assert torch.equal(request.media, media)
    assert request.prompts == prompts
    assert request.columns == COLUMNS


def test_uint8_is_sent_as_a_file_would_keep_it():
    request = unpack(pack(torch.tensor([-0.5, 0.0, 0.4999, 1.0, 1.5]).view(5, 1, 1, 1), ["p"] * 5, {}, as_uint8=True))
    assert request.media.dtype == torch.uint8
    assert request.media.flatten().tolist() == [0, 0, 127, 255, 255]


def test_media_that_are_uint8_or_half_are_taken_too():
    assert unpack(pack(torch.full((1, 1, 2, 2), 200, dtype=torch.uint8), ["p"], {})).media.unique().tolist() == [200]
    assert unpack(pack(torch.full((1, 1, 2, 2), 0.5).bfloat16(), ["p"], {})).media.dtype == torch.float32


def test_a_body_is_always_the_same_bytes_and_any_safetensors_reader_opens_it(tmp_path):
    from safetensors import safe_open

    body = pack(MEDIA, PROMPTS, COLUMNS)
    assert body == pack(MEDIA.clone(), list(PROMPTS), dict(COLUMNS))
    (tmp_path / "body").write_bytes(body)
    with safe_open(tmp_path / "body", "pt") as file:
        assert torch.equal(file.get_tensor("media"), MEDIA)
        assert json.loads(file.metadata()["prompts"]) == PROMPTS
        assert file.metadata()["format"] == "stretto.reward.1"


@pytest.mark.parametrize("bytes_", [b"", b"x", b"\xff" * 8, b"\x80\x04pickle", pack(MEDIA, PROMPTS, {})[:-1]])
def test_bytes_that_are_no_request_are_told_in_one_line(bytes_):
    with pytest.raises(ValueError, match="not a safetensors blob") as raised:
        unpack(bytes_)
    assert "\n" not in str(raised.value)


def test_a_safetensors_blob_of_something_else_is_no_request():
    from safetensors.torch import save

    texts = {"format": "stretto.reward.1", "prompts": '["p"]', "columns": "{}"}
    for tensors, metadata, told in [
        ({"media": MEDIA}, {}, "not a stretto.reward.1 request"),
        ({"other": MEDIA}, texts, "not a stretto.reward.1 request"),
        ({"media": MEDIA.double()}, texts, "media are torch.float64"),
        ({"media": MEDIA[0]}, texts, "of shape"),
        ({"media": MEDIA}, texts, "need as many prompts"),
        ({"media": MEDIA}, {**texts, "prompts": "[1, 2, 3]"}, "a JSON list of texts"),
        ({"media": MEDIA}, {**texts, "columns": "}"}, "are JSON in the metadata"),
    ]:
        with pytest.raises(ValueError, match=told):
            unpack(save(tensors, metadata))


def test_a_served_reward_gives_what_the_function_gives_bit_for_bit(served):
    def third(media, prompts, style, weight):
        assert (style, weight) == (COLUMNS["style"], COLUMNS["weight"])
        assert not torch.is_grad_enabled()
        return [1 / 3, math.nextafter(1e5, 2e5), float(media.double().sum())]

    here = score({"near": third}, MEDIA, PROMPTS, NAMES, COLUMNS)
    assert torch.equal(ask_once(served(third), **COLUMNS), here)
    assert torch.equal(ask_once(served(brightness)), score({"near": brightness}, MEDIA, PROMPTS, NAMES))


def test_uint8_on_the_wire_is_a_picture_in_0_to_1_for_the_reward(served):
    seen = []

    def look(media, prompts):
        seen.append(media)
        return [0.0] * len(media)

    ask_once(f"{served(look)}#uint8")
    assert torch.equal(seen[0], MEDIA.mul(255).round() / 255)


def test_a_request_says_where_it_goes_and_keeps_the_fragment_to_itself():
    with Misbehaving(well(1, 2, 3)) as service:
        ask_once(f"{service.address}?model=a%20b#uint8")
    assert service.heads[0].startswith("POST /score?model=a%20b HTTP/1.1\r\n")
    assert f"Host: 127.0.0.1:{service.port}\r\n" in service.heads[0] + "\r\n"


def test_a_reward_that_raises_over_there_is_told_with_its_sample_and_not_asked_again(served):
    calls = []

    def picky(media, prompts):
        calls.append(len(prompts))
        if PROMPTS[1] in prompts:
            raise KeyError("no\ntarget")
        return [0.0] * len(prompts)

    reward, retries = load_reward(served(picky)), Retries(Scoring(attempts=5, backoff_s=9.0, timeout_s=5.0))
    with pytest.raises(RewardError, match=r"answered 422 .*: the function raised KeyError") as raised:
        score({"far": reward}, MEDIA, PROMPTS, NAMES, how=retries.ask)
    assert raised.value.sample == "sample 1 of group 0"
    assert "\n" not in str(raised.value)
    assert calls == [3, 1, 1]  # the batch, and the server's search for the sample; nothing from here
    assert retries.take() == {"failures": 0, "retries": 0, "skipped": 0, "lost_s": 0.0}


def test_a_nan_over_there_is_told_with_its_sample(served):
    with pytest.raises(RewardError, match="returned nan, not a finite number") as raised:
        ask_once(served(lambda media, prompts: [0.0, 1.0, float("nan")]))
    assert raised.value.sample == "sample 0 of group 1"


def test_a_service_behind_a_service_that_fails_may_be_asked_again(served):
    with pytest.raises(ServiceError, match=r"answered 503 .*: the service behind this one refused the connection"):
        RemoteReward(served(RemoteReward(f"http://127.0.0.1:{free_port()}/")))(MEDIA, PROMPTS)


GARBAGE = {
    "no JSON": (says("200 OK", b"<html>\nnginx</html>"), r"answered '<html> nginx</html>', not"),
    "another JSON": (says("200 OK", [1, 2, 3]), 'not {"rewards"'),
    "nothing": (says("200 OK", b""), "answered '', not"),
    "too few": (well(1, 2), "answered 2 rewards for 3 samples"),
    "too many": (well(1, 2, 3, 4), "answered 4 rewards for 3 samples"),
    "a NaN": (says("200 OK", b'{"rewards": [1, NaN, 3]}'), "answered 'nan' as reward 1 of 3"),
    "an infinity": (says("200 OK", b'{"rewards": [1, 2, 1e999]}'), "answered 'inf' as reward 2 of 3"),
    "an integer too large": (well(10**4000, 2, 3), "as reward 0 of 3: no number"),
    "a text": (well(1, "2", 3), "as reward 1 of 3: no number"),
    "a null": (well(None, 2, 3), "answered 'None' as reward 0 of 3"),
    "a truth": (well(1, 2, True), "answered 'True' as reward 2 of 3"),
    "deep nesting": (says("200 OK", b"[" * 100_000), 'not {"rewards"'),
    "no HTTP": (misbehaving.speaks_in_tongues, "broke the connection .BadStatusLine"),
    "half an answer": (says("200 OK", {"rewards": [1, 2, 3]}, length=100), "broke off with 78 bytes"),
    "no answer": (misbehaving.hangs_up, "broke the connection .RemoteDisconnected"),
    "a reset": (misbehaving.resets, "broke the connection .ConnectionResetError"),
    "a flood": (misbehaving.floods, "answered more than"),
    "500": (says("500 Internal\x07 Server Error", b"Traceback ..."), "answered 500 "),
    "503": (says("503 Busy", {"error": "later"}), "answered 503 Busy: later"),
    "429": (says("429 Slow Down", b""), "answered 429 Slow Down$"),
}


@pytest.mark.parametrize(("behaviour", "told"), GARBAGE.values(), ids=GARBAGE)
def test_nothing_is_made_of_garbage(behaviour, told):
    with Misbehaving(behaviour) as service, pytest.raises(ServiceError, match=told) as raised:
        RemoteReward(service.address, 5.0)(MEDIA, PROMPTS)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("behaviour", [misbehaving.hangs, misbehaving.dribbles], ids=["hangs", "dribbles"])
def test_one_deadline_is_over_the_whole_attempt(behaviour):
    with Misbehaving(behaviour) as service:
        started = time.monotonic()
        with pytest.raises(ServiceError, match=r"no whole answer within 0\.3 s"):
            RemoteReward(service.address, 0.3)(MEDIA, PROMPTS)
        assert 0.29 < time.monotonic() - started < 5


def test_the_deadline_is_over_a_slow_upload_too():
    over, media = threading.Event(), torch.zeros(3, 3, 2048, 1024)
    with Misbehaving(lambda connection: over.wait(20), reads=False) as service:
        started = time.monotonic()
        with pytest.raises(ServiceError, match=r"no whole answer within 0\.3 s"):
            RemoteReward(service.address, 0.3)(media, PROMPTS)
        assert time.monotonic() - started < 5
        over.set()


def test_an_answer_that_comes_before_the_whole_body_was_read_is_heard():
    def says_no(connection):
        connection.recv(1024)
        says("413 Too Large", {"error": "smaller"})(connection)
        connection.shutdown(1)
        time.sleep(0.2)

    with (
        Misbehaving(says_no, reads=False) as service,
        pytest.raises(RefusedError, match="answered 413 Too Large: smaller"),
    ):
        RemoteReward(service.address, 5.0)(torch.zeros(3, 3, 1024, 1024), PROMPTS)


@pytest.mark.parametrize("status", ["400 Bad", "404 Not Found", "301 Moved", "204 No Content"])
def test_a_service_that_says_no_is_not_asked_again(status):
    with Misbehaving(says(status, b"")) as service, pytest.raises(RewardError, match=f"answered {status}") as raised:
        score({"far": RemoteReward(service.address)}, MEDIA, PROMPTS, NAMES, how=Retries(Scoring()).ask)
    assert isinstance(raised.value.__cause__, RefusedError)
    assert len(service.bodies) == 1


@pytest.mark.parametrize("row", [1, 7, -1, True, "1", None])
def test_a_row_is_named_if_there_is_one(row):
    refusal = says("422 No", {"error": "bad\npicture", "row": row})
    with Misbehaving(refusal) as service, pytest.raises(RewardError, match="422 No: bad picture") as raised:
        ask_once(service.address)
    assert raised.value.sample == (
        "sample 1 of group 0" if row == 1 and row is not True else "samples 0 of group 0 to 0 of group 1"
    )


def test_metadata_that_is_not_json_is_a_fault_of_ours_and_not_of_the_service():
    for bad in (object(), float("nan"), MEDIA):
        with pytest.raises(RewardError, match="its metadata cannot be sent as JSON"):
            ask_once(f"http://127.0.0.1:{free_port()}/", bad=[bad, 1, 2])


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("https://host/x", "https:// is not spoken"),
        ("ftp://host/x", "ftp:// is not spoken"),
        ("http://", "it names no host"),
        ("http:///path", "it names no host"),
        ("http://host:port/x", "Port could not be cast"),
        ("http://host:99999/x", "Port out of range"),
        ("http://me:secret@host/x", "it may hold no password"),
        ("http://host/a b", "blanks and letters beyond ASCII"),
        ("http://host/x\r\nX: y", "blanks and letters beyond ASCII"),
        ("http://host/x#uint16", "#uint16 is unknown"),
        ("http://[::1/x", "Invalid IPv6 URL"),
    ],
)
def test_an_address_that_is_none_is_told_in_one_line(address, told):
    with pytest.raises(ValueError, match="an address is written http://host:port/path") as raised:
        load_reward(address)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_loading_an_address_asks_nobody():
    reward = load_reward(f"http://127.0.0.1:{free_port()}")
    assert isinstance(reward, RemoteReward)
    assert reward.within(3.0).timeout_s == 3.0
    assert (load_reward("http://[::1]:81/").host, load_reward("http://host").port) == ("::1", 80)


def test_a_wrong_name_or_a_taken_port_ends_the_server_with_one_line(capsys, served):
    assert main(["digitz", "--port", "0"]) == 2
    assert "did you mean digits" in capsys.readouterr().err
    port = served(brightness).split(":")[2].strip("/")
    assert main(["brightness", "--port", port]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["brightness", "--port", "70000"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_request_whose_asker_has_gone_is_dropped(served):
    calls, begun, turn = [], threading.Event(), threading.Event()

    def slow(media, prompts):
        calls.append(len(prompts))
        begun.set()
        turn.wait(20)
        return [0.0] * len(prompts)

    address = served(slow)
    patient = threading.Thread(target=RemoteReward(address, 20.0), args=(MEDIA, PROMPTS))
    patient.start()
    assert begun.wait(10)
    for _ in range(3):
        with pytest.raises(ServiceError, match="within"):
            RemoteReward(address, 0.1)(MEDIA, PROMPTS)
    turn.set()
    patient.join()
    assert RemoteReward(address, 10.0)(MEDIA, PROMPTS) == [0.0] * 3
    assert calls == [3, 3]


def start(port, name="brightness"):
    words = [sys.executable, "-m", "stretto.rewards.serve", name, "--port", str(port)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_a_server_that_is_killed_for_good_and_started_again_costs_waiting_and_nothing_else():
    port = free_port()
    first = start(port)
    assert first.stdout.readline() == f"brightness is served at http://127.0.0.1:{port}/\n"
    retries = Retries(Scoring(attempts=40, backoff_s=0.25, timeout_s=10.0))
    rewards = {"far": load_reward(f"http://127.0.0.1:{port}/")}
    expected = score({"near": brightness}, MEDIA, PROMPTS, NAMES)
    assert torch.equal(score(rewards, MEDIA, PROMPTS, NAMES, how=retries.ask), expected)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = start(port)
    try:
        with pytest.warns(UserWarning, match="refused the connection; again in"):
            assert torch.equal(score(rewards, MEDIA, PROMPTS, NAMES, how=retries.ask), expected)
        assert retries.take()["failures"] >= 1
        second.send_signal(signal.SIGINT)
        assert second.wait(10) == 130
    finally:
        second.kill()
        second.wait()
        first.stdout.close()
        second.stdout.close()


def test_a_server_that_is_stopped_while_it_scores_ends_as_it_meant_to(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import time, torch\n"
        "def computes(media, prompts):\n"
        "    print('begun', flush=True)\n"
        "    end = time.monotonic() + 1\n"
        "    while time.monotonic() < end:\n"
        "        torch.randn(300, 300) @ torch.randn(300, 300)\n"
        "    return [0.0] * len(prompts)\n"
    )
    server = start(0, f"{tmp_path / 'mine.py'}:computes")
    address = server.stdout.readline().split()[-1]

    def asks():
        with contextlib.suppress(ServiceError):  # its answer may or may not come before the end
            RemoteReward(address, 20.0)(MEDIA, PROMPTS)

    asker = threading.Thread(target=asks)
    asker.start()
    assert server.stdout.readline() == "begun\n"
    server.send_signal(signal.SIGINT)
    assert server.wait(20) == 130
    asker.join()
    server.stdout.close()


def test_the_server_needs_no_package_that_a_scorer_could_conflict_with():
    program = (
        "import sys, stretto.rewards.serve; "
        "print(sorted({'diffusers', 'peft', 'transformers', 'sklearn', 'tyro', 'cattrs', 'PIL'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
