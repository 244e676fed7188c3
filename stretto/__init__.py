"""stretto: diffusion RL that never runs a forward twice.

In a fugue, *stretto* is where each voice enters before the last has finished. Importing the package loads
nothing else; take what you need from its rooms: `stretto.policy` (torch only), `stretto.models`,
`stretto.rewards`, `stretto.record`, and the loop, `stretto.train`.
"""

__version__ = "0.1.0"
