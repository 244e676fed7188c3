"""The end of a process that was one rank of many.

The interpreter's own end can abort such a process (SIGABRT, "terminate called without an active exception") after all
its work was done. A thread of ProcessGroupGloo lets go of an operation only after it has woken those who wait for it,
and to let go of its tensors it takes the interpreter's lock. Where it is waiting for the lock when the end begins, it
is given none and made to end itself, through C++ that may not be unwound: runLoop, TensorImpl::decref_pyobject,
PyEval_AcquireThread, pthread_exit, std::terminate (torch 2.13, Python 3.11). A barrier before does not help: it says
that operations are done, not that they are let go. So a rank ends without the interpreter's end. The hazard is what
only that end does: functions registered with `atexit` are run here, finalizers of objects are not.
"""

import atexit
import contextlib
import os
import sys
from typing import NoReturn

__all__ = ["end_process"]


def end_process(code: int) -> NoReturn:
    """Run what was registered with `atexit`, flush stdout and stderr, and end with `code`, whatever threads do."""
    try:
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
