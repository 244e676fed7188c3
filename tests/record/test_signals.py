"""Signals: noted for the end of the iteration, at once the second time, and the handlers put back."""

import os
import pickle
import signal
import threading
import time

import pytest

from stretto.record.signals import Interrupted, Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_stops_at_once(number, capfd):
    before = signal.getsignal(number)
    with Signals() as signals:
        signals.reraise()
        os.kill(os.getpid(), number)
        assert signals.caught == number
        assert capfd.readouterr().err.strip().startswith(signal.Signals(number).name)
        with pytest.raises(Interrupted) as caught:
            os.kill(os.getpid(), number)
    assert caught.value.signal_number == number
    assert signal.getsignal(number) is before


def test_the_loop_ends_by_raising_what_was_caught():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            signals.reraise()


def test_outside_the_main_thread_nothing_is_handled():
    caught = []

    def work():
        with Signals() as signals:
            caught.append(signals.caught)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert caught == [None]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_launchers_echo_of_a_signal_is_the_same_wish_and_a_later_one_stops_at_once():
    with Signals(echo_s=0.5) as signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert signals.caught == signal.SIGINT
        time.sleep(0.5)
        with pytest.raises(Interrupted, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_of_another_rank_ends_the_loop_here_too():
    with Signals() as signals:
        signals.reraise(None)
        with pytest.raises(Interrupted) as caught:
            signals.reraise(signal.SIGTERM)
    assert pickle.loads(pickle.dumps(caught.value)).signal_number == signal.SIGTERM
