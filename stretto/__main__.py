"""`python -m stretto` and `torchrun -m stretto`: the same as the command `stretto`."""

import os
import sys
from typing import NoReturn

from stretto.cli import main

__all__ = ["run"]


def run() -> NoReturn:
    """Run the command line and end the process with its exit code; one rank of many as `leaving` says."""
    code = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from stretto.leaving import end_process

        end_process(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
