"""What tests make adapters with, in place of a gateway."""

from __future__ import annotations

from typing import Any

from gateway.engines.base import AdapterContext, TextCodec


def lent(model: str = "policy", tokenizer: TextCodec | None = None, **others: Any) -> AdapterContext:
    """The context of an adapter; without a `tokenizer`, as most kinds of engines need none."""
    return AdapterContext(model=model, tokenizer=tokenizer, **others)
