"""`python -m stretto` and `torchrun -m stretto`: the same as the command `stretto`."""

import sys

from stretto.cli import main

if __name__ == "__main__":
    sys.exit(main())
