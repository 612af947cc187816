"""The vLLM plugin: registers our weight-transfer backend, `--weight-transfer-config '{"backend": "laminar"}'`.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`); the backend itself is imported only
in those that hold weights, and only when it is configured.
"""

from __future__ import annotations

BACKEND = "laminar"


def register() -> None:
    """Idempotent: vLLM may call it more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "paramserver.plugins.vllm_backend", "SnapshotTransfer")
