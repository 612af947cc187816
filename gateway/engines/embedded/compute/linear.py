"""A matrix product `x @ W.T (+ b)` with the weight in the layout that the processor likes best.

On CPU the weight is kept only in oneDNN's packed layout: at 16 rows in bf16 that is 1.6x the speed of a plain
`linear`, which repacks the weight at every call. A new weight is packed beside the old one and then takes its place,
so at most one extra matrix is alive during an update. Elsewhere (a GPU) it is a plain tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)

PACK_ROWS_HINT = 16
"""Batch size that the packed layout is chosen for; other sizes run on it at full speed (measured)."""


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed products are there for this device and dtype."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Linear:
    """One product of the forward pass; `weight` is `[out, in]` when set."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packs = can_pack(weight.device, weight.dtype)
        self.set(weight, bias)

    def set(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Replaces weight and bias; shapes must be those of before."""
        assert weight.shape == (self.out_features, self.in_features)
        self._bias = bias
        if self._packs:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS_HINT)
        else:
            self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packs:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return product
        return F.linear(x, self._weight, self._bias)
