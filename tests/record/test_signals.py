"""Signals: noted for the end of the iteration, at once the second time, and the handlers put back."""

import os
import signal
import threading

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
