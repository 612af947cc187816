"""`python tied.py PROGRAM ...`: becomes PROGRAM, which the kernel kills when the starting process dies (Linux).

A program of its own because the starter must not do this between fork and exec: it has gRPC threads, whose
fork handlers abort the child. Standard library only, and little of it: it runs before every process.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be tied to
        sys.exit(1)
    os.execv(arguments[0], arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
