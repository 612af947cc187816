"""Unix time for what is compared: ages, deadlines, leases, proofs.

Invariant: it runs on at its own pace while the process lives, though the host's clock be set, by hours where it was
wrong at the boot: such a step must neither end what is young, nor date what follows before what was.

What is kept beyond the process is compared with the time that the next one begins with.
"""

from __future__ import annotations

import time

_BEGAN_S = time.time() - time.monotonic()


def unix_s() -> float:
    return _BEGAN_S + time.monotonic()
