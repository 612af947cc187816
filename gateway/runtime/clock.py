"""Unix time for comparisons: ages, deadlines, leases, evidence.

Invariant: it advances at its own pace while the process lives, even if the host's clock is set, by hours where it was
wrong at boot. Such a step must neither expire what is young, nor date an event before an earlier one.

Stored times are compared with the time at which the next process begins.
"""

from __future__ import annotations

import time

_BEGAN_S = time.time() - time.monotonic()


def unix_s() -> float:
    return _BEGAN_S + time.monotonic()
