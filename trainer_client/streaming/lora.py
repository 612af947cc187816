"""The weights of a model with LoRA adapters, merged one tensor at a time: W + scale * B @ A, by the names of the base.

Invariants:
- the model is only read: nothing is merged into it, and one merged tensor lies in memory at a time;
- a merged tensor has the values that peft's `merge_and_unload` gives it, then the dtype wished for;
- what this cannot merge (DoRA, convolutions, a bias of an adapter, rows of an embedding that are trained by
  themselves) is refused by name, before a tensor is made.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protos.errors import InvalidRequest
from trainer_client.streaming.manifest import Manifest, TensorMeta, memory_of, to_the_end

PREFIX = "base_model.model."
"""Of a `PeftModel`; a model whose own `add_adapter` was called, as transformers' have it, is without."""
TOKENS = "token_adapter"
"""What peft puts in the place of an embedding, and of a head that is tied to it, with `trainable_token_indices`."""
MARK = "lora_"
FACTORS = {"lora_A": "a", "lora_B": "b", "lora_embedding_A": "a", "lora_embedding_B": "b"}


@dataclass(frozen=True, slots=True)
class _Adapter:
    """The two factors of one adapter of one weight. `transposed`: the weight is (in, out)."""

    a: Any
    b: Any
    scale: float
    transposed: bool
    rounded: bool  # the product becomes of the weight's dtype before it is added: peft does so with embeddings


@dataclass(frozen=True, slots=True)
class MergedLora:
    """What to pass to `publish_stream`: `publish_stream(merged.manifest, merged.tensors, step=...)`."""

    manifest: Manifest
    tensors: Callable[[], Iterator[tuple[str, Any]]]


def merged_lora(
    model: Any,
    *,
    scale: float | Mapping[str, float] | None = None,
    adapters: Sequence[str] | None = None,
    dtype: Any = None,
) -> MergedLora:
    """A peft model, a transformers model with adapters, or the state dict of either, as the merged weights of its base.

    `scale`: lora_alpha / r (with rsLoRA: / sqrt(r)), one for all adapters or by the adapter's name; a model has its
    own. `adapters`: those to merge; default: the model's active ones, or the only one of a state dict. `dtype`: what
    floating-point tensors become; default: they stay. DTensors (FSDP2) are gathered one by one, a collective: every
    rank goes through `tensors()` in step.

    Raises InvalidRequest for what cannot be merged.
    """
    layers = _layers(model)
    state = dict(model.state_dict() if hasattr(model, "state_dict") else model)
    chosen = _chosen(state, _active(model) if adapters is None else adapters)
    bases, factors = _sorted_out(state, chosen)
    found = {
        name: [_adapter(name, one, pair, layers, scale) for one, pair in by_adapter.items()]
        for name, by_adapter in factors.items()
    }
    for name, ones in found.items():
        if name not in bases:
            raise InvalidRequest(f"{name!r} has adapters and no weight", hint="pass the whole model's state dict")
        for one in ones:
            _check_shapes(name, tuple(bases[name].shape), one)

    def tensors() -> Iterator[tuple[str, Any]]:
        def merged(pair: tuple[str, Any]) -> tuple[str, Any]:
            name, tensor = pair
            return name, _merged(name, tensor, found.get(name, ()), dtype)

        return to_the_end(_once(bases, found), merged)

    return MergedLora(_manifest(bases, found, dtype), tensors)


# ---- names


def _base_name(name: str) -> str:
    return re.sub(r"(^|\.)base_layer\.", r"\1", name.removeprefix(PREFIX))


def _sorted_out(
    state: Mapping[str, Any], chosen: Sequence[str]
) -> tuple[dict[str, Any], dict[str, dict[str, dict[str, Any]]]]:
    """The base's tensors, and the factors of each weight: {weight: {adapter: {"lora_A": ..., ...}}}."""
    bases: dict[str, Any] = {}
    factors: dict[str, dict[str, dict[str, Any]]] = {}
    for name, tensor in state.items():
        parts = name.split(".")
        if TOKENS in parts:
            raise InvalidRequest(
                f"{name!r}: rows of trainable_token_indices cannot be merged here",
                hint="publish model.merge_and_unload()",
            )
        at = next((i for i, part in enumerate(parts) if part.startswith(MARK)), None)
        if at is not None:
            adapter = parts[at + 1] if at + 1 < len(parts) else ""
            if adapter not in chosen:
                continue
            if parts[at] not in FACTORS or parts[-1] == "bias":
                what = "DoRA" if "magnitude" in parts[at] else f"{parts[at]!r}"
                raise InvalidRequest(f"{name!r}: {what} cannot be merged here", hint="publish model.merge_and_unload()")
            weight = _base_name(".".join([*parts[:at], "weight"]))
            factors.setdefault(weight, {}).setdefault(adapter, {})[parts[at]] = tensor
        elif "modules_to_save" in parts:  # a module that is trained whole, beside the one that it replaces
            at = parts.index("modules_to_save")
            if parts[at + 1] in chosen:
                bases[_base_name(".".join(parts[:at] + parts[at + 2 :]))] = tensor
        elif "original_module" not in parts:
            bases[_base_name(name)] = tensor
    return bases, factors


def _chosen(state: Mapping[str, Any], wished: Sequence[str] | None) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for name in state:
        parts = name.split(".")
        for one, following in itertools.pairwise(parts):
            if one in FACTORS:
                found[following] = None
    if not found:
        raise InvalidRequest("no tensor is of a LoRA adapter", hint="publish a model without adapters as it is")
    if wished is None and len(found) > 1:
        raise InvalidRequest(f"the adapters are {', '.join(found)}", hint="name those to merge by adapters=")
    chosen = tuple(found) if wished is None else tuple(wished)
    if unknown := [one for one in chosen if one not in found]:
        raise InvalidRequest(f"there is no adapter {unknown[0]!r}", hint=f"the adapters are {', '.join(found)}")
    return chosen


# ---- adapters


def _active(model: Any) -> Sequence[str] | None:
    """The active adapters: peft has a property, transformers a method; None of anything else."""
    found = getattr(model, "active_adapters", None)
    return found() if callable(found) else found


def _layers(model: Any) -> dict[str, Any]:
    """The LoRA layers of a peft model by the name of their weight; none of a state dict."""
    if not hasattr(model, "named_modules"):
        return {}
    found = {_base_name(f"{name}.weight"): one for name, one in model.named_modules() if hasattr(one, "lora_A")}
    for name, layer in found.items():
        if getattr(layer, "merged", False):
            raise InvalidRequest(f"an adapter is merged into {name!r} already", hint="call unmerge_adapter() first")
    return found


def _adapter(
    name: str,
    adapter: str,
    pair: Mapping[str, Any],
    layers: Mapping[str, Any],
    scale: float | Mapping[str, float] | None,
) -> _Adapter:
    embedding = "lora_embedding_A" in pair
    pair = {FACTORS[kind]: tensor for kind, tensor in pair.items()}
    if pair.keys() != {"a", "b"}:
        raise InvalidRequest(f"adapter {adapter!r} of {name!r} lacks one factor", hint="pass both lora_A and lora_B")
    layer = layers.get(name)
    if scale is None and layer is None:
        raise InvalidRequest("a state dict does not hold the adapters' scale", hint="pass scale=lora_alpha / r")
    if scale is None:
        its = float(layer.scaling[adapter])  # type: ignore[union-attr]
    elif isinstance(scale, Mapping):
        if adapter not in scale:
            raise InvalidRequest(f"scale has no adapter {adapter!r}", hint=f"it has {', '.join(scale)}")
        its = float(scale[adapter])
    else:
        its = float(scale)
    transposed = embedding or bool(getattr(layer, "fan_in_fan_out", False))
    return _Adapter(pair["a"], pair["b"], its, transposed, rounded=embedding)


def _check_shapes(name: str, shape: tuple[int, ...], one: _Adapter) -> None:
    a, b = tuple(one.a.shape), tuple(one.b.shape)
    made = (b[0], a[1]) if len(a) == len(b) == 2 and a[0] == b[1] else None
    if made is not None and one.transposed:
        made = (made[1], made[0])
    if made != shape:
        raise InvalidRequest(
            f"the adapter of {name!r} has factors {list(b)} and {list(a)}, its weight is {list(shape)}",
            hint="this merges linear layers and embeddings; publish model.merge_and_unload() for others",
        )


# ---- tensors


def _once(bases: Mapping[str, Any], adapters: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each tensor under its first name; one with adapters is no longer tied to any other."""
    seen: set[object] = set()
    for name, tensor in bases.items():
        memory = name if name in adapters else memory_of(name, tensor)
        if memory not in seen:
            seen.add(memory)
            yield name, tensor


def _manifest(bases: Mapping[str, Any], adapters: Mapping[str, Any], dtype: Any) -> Manifest:
    kept = dict(_once(bases, adapters))
    owners = {memory_of(name, tensor): name for name, tensor in kept.items() if name not in adapters}
    tied = {name: owners[memory_of(name, tensor)] for name, tensor in bases.items() if name not in kept}
    metas = (
        TensorMeta(name, dtype if dtype is not None and one.is_floating_point() else one.dtype, tuple(one.shape))
        for name, one in kept.items()
    )
    return Manifest.of(Manifest(tuple(metas), tied))


def _merged(name: str, weight: Any, adapters: Sequence[_Adapter], dtype: Any) -> Any:
    from trainer_client.torch_sources import cast  # it imports torch

    whole = _whole(weight)
    for one in adapters:
        delta = _delta(one)
        if one.rounded:
            delta = delta.to(whole.dtype)
        whole = (whole + delta).to(whole.dtype)  # as peft's `weight.data += delta`
    return cast(name, whole, dtype) if dtype is not None and whole.is_floating_point() else whole


def _delta(one: _Adapter) -> Any:
    a, b = _whole(one.a), _whole(one.b)
    kind = a.dtype
    if a.device.type == "cpu" and kind.itemsize == 2:  # as peft: slow or lacking there
        a, b = a.float(), b.float()
    product = b @ a
    return ((product.T if one.transposed else product) * one.scale).to(kind)


def _whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()
