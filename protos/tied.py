"""`python tied.py PROGRAM ...`: becomes PROGRAM, which the kernel kills when the thread that started it ends (Linux).

A program of its own because the starter must not do this between fork and exec: it has gRPC threads, whose
fork handlers abort the child. Standard library only, and little of it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        sys.exit(1)
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606 - its only purpose
