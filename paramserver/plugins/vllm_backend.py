"""The backend inside a vLLM worker: every rank maps the snapshot and takes its slice through `model.load_weights`.

    POST /init_weight_transfer_engine {"init_info": {"path", "version", "digest"}}    proves; touches nothing
    POST /start_weight_update
    POST /update_weights {"update_info": {"path", "version", "digest"}}               loads, and keeps the outcome
    POST /init_weight_transfer_engine {"init_info": {"version", "expect": "loaded"}}  checks the outcome
    POST /finish_weight_update {"weight_version"}                                     refused unless all of it landed

Invariants:
- no weight is touched before every chunk of the snapshot matched its digest, and a tied head its embeddings;
- `landed` is set only when every rank loaded every parameter: a snapshot that lacks a tensor fails, where vLLM by
  itself would keep the old layer;
- ranks agree on an outcome, and only the last one raises it, outside of an update session. vLLM's executor reads the
  ranks' answers in order and stops at the first failure; it would take the answers left unread for those of its next
  call. And a worker that raises within a session closes that session, in its own rank only.

Written for vLLM 0.32 and 0.33 (`vllm/distributed/weight_transfer/base.py`, `v1/executor/multiproc_executor.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from paramserver.plugins.snapshot import Share, Tensors, check_tied, prove
from protos.errors import Conflict, InvalidRequest

log = logging.getLogger("vllm.laminar")


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not among the packages that are type-checked
    """`path` and `digest` request a proof; `expect` checks the update session. Neither changes anything."""

    path: str = ""
    version: str = ""
    digest: str = ""
    expect: Literal["", "closed", "loaded"] = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One whole snapshot: `digest` is the root that its version was sealed with."""

    path: str
    version: str
    digest: str


class SnapshotTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """The backend of one rank."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open = False
        self._proven = ("", "")
        self._landed = ""  # the version that this session brought into every rank
        self._problem = ""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        problem = self._agree(lambda: self._check(init_info))
        if problem and self._is_last:
            raise RuntimeError(problem)

    def start_weight_update(self) -> None:
        self._open, self._landed, self._problem = True, "", "no weights were sent"

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._landed = ""
        self._problem = self._agree(lambda: self._load(update_info))
        if not self._problem:
            self._landed = update_info.version

    def finish_weight_update(self) -> None:
        if not self._landed:
            raise RuntimeError(f"there is nothing to finish: {self._problem}")
        self._open = False

    def shutdown(self) -> None:
        """Nothing to do: nothing is held between two calls."""

    # -- what this rank does

    def _check(self, request: InitInfo) -> None:
        if request.expect == "closed" and self._open:
            raise Conflict("a weight update is open", hint="send /update_weights, then /finish_weight_update")
        if request.expect == "loaded" and self._landed != request.version:
            raise Conflict(f"version {request.version!r} is not loaded: {self._problem or 'another one is'}")
        if request.path:
            self._prove(request.path, request.digest)

    def _prove(self, path: str, root_digest: str) -> None:
        self._proven = ("", "")
        config = self.parallel_config
        mine = config.rank % config.local_world_size
        prove(Path(path), root_digest, Share(mine, config.local_world_size))
        if mine == 0 and getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            check_tied(Path(path))
        self._proven = (path, root_digest)

    def _load(self, update: UpdateInfo) -> None:
        if self._proven != (update.path, update.digest):
            self._prove(update.path, update.digest)
        self._proven = ("", "")
        try:
            initialize_layerwise_reload(self.model)
            wanted = {name for name, _ in self.model.named_parameters()}
            with Tensors(Path(update.path)) as tensors:
                loaded = self.model.load_weights(iter(tensors))
            self._check_complete(wanted, loaded)
        finally:
            # After a failure, too: parameters must not stay without memory, or no later load could mend them.
            finalize_layerwise_reload(self.model, self.model_config)

    def _check_complete(self, wanted: set[str], loaded: set[str] | None) -> None:
        """vLLM's own rule for a first load: quantised models make parameters that no checkpoint has."""
        if loaded is None or self.model_config.quantization is not None:
            return
        if missing := sorted(wanted - loaded):
            raise InvalidRequest(
                f"the snapshot has nothing for {len(missing)} of {len(wanted)} parameters, such as {missing[0]}",
                hint="publish every tensor of the model, by its checkpoint name",
            )

    # -- what ranks do together

    @property
    def _is_last(self) -> bool:
        return bool(self.parallel_config.rank == self.parallel_config.world_size - 1)

    def _agree(self, work: Callable[[], None]) -> str:
        """Runs `work` in every rank; what went wrong in the first rank where anything did, "" when nothing did."""
        problem = ""
        try:
            work()
        except Exception as error:
            log.exception("rank %d", self.parallel_config.rank)
            problem = f"rank {self.parallel_config.rank}: {type(error).__name__}: {error}"
        group = get_world_group()
        problems: list[Any] = [problem] * group.world_size
        if group.world_size > 1:
            torch.distributed.all_gather_object(problems, problem, group=group.cpu_group)
        return next(filter(None, problems), "")
