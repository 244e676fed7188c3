"""Children of the test process: what they write is on a real disk, and they die by a real SIGKILL."""

import contextlib
import os
import shutil
import signal
import traceback
from pathlib import Path


def child(work):
    """Fork, do `work()` in the child and exit there with 0, or 1 after a traceback; returns the child's number."""
    number = os.fork()
    if number:
        return number
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def end_of(number):
    """Wait for a child; 0 if it exited well, 1 if it failed, -9 if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def kill(number):
    os.kill(number, signal.SIGKILL)
    assert end_of(number) == -signal.SIGKILL


def kill_before_step(step):
    """Make this process kill itself before the `step`-th call that changes what is on the disk."""
    left = [step]

    def wrap(owner, name):
        original = getattr(owner, name)

        def counted(*args, **options):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        setattr(owner, name, counted)

    for owner, name in [
        (os, "fsync"),
        (os, "write"),
        (os, "ftruncate"),
        (Path, "mkdir"),
        (Path, "rename"),
        (Path, "replace"),
        (Path, "unlink"),
        (Path, "open"),
        (shutil, "rmtree"),
    ]:
        wrap(owner, name)


def kill_at_every_step(prepare, work, look):
    """For step 0, 1, 2, ...: prepare, kill a child before that step of its work, look; until one ends on its own.

    Returns the number of kills.
    """
    step = 0
    while True:
        prepare()

        def die(step=step):
            kill_before_step(step)
            work()

        ended = end_of(child(die))
        look()
        if ended == 0:
            return step
        assert ended == -signal.SIGKILL
        step += 1


@contextlib.contextmanager
def left_as_it_was(folder):
    """What is in the folder, byte for byte, must be the same after the block."""
    before = contents(folder)
    yield
    assert contents(folder) == before


def contents(folder):
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}
