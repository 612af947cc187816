"""Runs programs that nobody trusts, such as code that a model wrote: with bounds, and without a trace.

The way in is `Sandbox` of `client.py`. The confinement is a kept sandbox's: `sandlock` where the kernel has what it
needs, else `bubblewrap`. What is here chooses one, adds the bounds that it lacks, and refuses by name where a bound
cannot be had.

Each run has a process of its own, the keeper (`keeper.py`), which is the parent of everything that the run starts. It
starts once for each run, so the modules that it imports are few: nothing is imported here.
"""
