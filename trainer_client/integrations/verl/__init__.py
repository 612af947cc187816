"""verl on a Laminar fleet (extra `verl`, verl 0.9): `engine` is the checkpoint engine `laminar`, `manager` publishes to
engines that verl does not start, `agent_loop` rolls out through the gateway. See docs/verl.md.

verl loads `engine` by itself, in each of its processes, through the entry point group `verl.plugins`.
"""
