"""What measures: speed (`schedules`), memory (`memory`) and the field (`field`); results in `results/`, JSON.

Run a module from the root of the repository: `python -m bench.schedules`. Numbers depend on the machine; a figure
in the docs is made from a JSON in `results/` by `python -m bench.page`, never typed.
"""

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # gloo warns that 10.77.0.254 has no name (bench.link)
