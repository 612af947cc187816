"""Measures, in about a second, in which dtype this processor computes a model's matrix products fastest.

The shapes are those of the model: a decode step of 8 sequences and a prefill through the engine's own packed products,
and a training step's products, forward and backward, as torch has them.

Dtypes are compared by processor time with one thread, which other load does not change. Numbers of threads can only be
compared by wall time: the best of several short rounds comes close to that of an idle machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, get_args

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)

from gateway.core.dtypes import SERVING, Choice, Dtype, Figure, Work, choose
from gateway.engines.embedded.compute.linear import Linear
from gateway.engines.embedded.compute.shape import read_shape
from protos.process import usable_cores

DECODE_ROWS = 8
PREFILL_ROWS = 128
TRAIN_ROWS = 64
LAYERS_MAX = 4
"""Layers that engines' products are measured over: more than a core's own caches hold, as a whole model is."""
HEAD_SHARE = 8
"""Only this fraction (1/8) of the vocabulary is measured."""
SLICE_S = 0.05
"""How long one figure is measured; once at least, however long that takes."""
ROUNDS_MAX = 1000
THREADS_MAX = 2
"""More are not compared: the other engines on the host need cores, too."""


W = TypeVar("W", Linear, torch.Tensor)


@dataclass(frozen=True, slots=True)
class Shapes:
    """A decoder's matrix products: `[out, in]` of each in one layer, and of the head."""

    layer: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    num_layers: int


SMALL = Shapes(((960, 576), (576, 576), (3072, 576), (576, 1536)), (49152, 576), 30)
"""A Llama of 135 million parameters, when no model is named."""


def shapes_of(directory: Path) -> Shapes:
    """InvalidRequest when `directory` is not a model that the embedded engine runs."""
    s = read_shape(directory)
    q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    layer = ((q + 2 * kv, s.hidden), (s.hidden, q), (2 * s.intermediate, s.hidden), (s.hidden, s.intermediate))
    return Shapes(layer, (s.vocab, s.hidden), s.num_layers)


def measure(shapes: Shapes = SMALL, work: Work = SERVING, *, cores: int | None = None) -> Choice:
    """Both dtypes with one thread; the better one also with two, where there are two cores."""
    cores = usable_cores() if cores is None else cores
    before = torch.get_num_threads()
    try:
        products = {dtype: _Products(shapes, dtype) for dtype in get_args(Dtype)}
        figures = [products[dtype].figure(1, time.process_time) for dtype in products]
        if cores > 1:
            chosen = choose(figures, work)
            figures.append(_with_more_threads(products[chosen.dtype], chosen.chosen, min(cores, THREADS_MAX)))
        return choose(figures, work)
    finally:
        torch.set_num_threads(before)


def _with_more_threads(products: _Products, single: Figure, threads: int) -> Figure:
    """The figure of one thread, times what more threads gain by wall time."""
    one, more = (products.figure(count, time.perf_counter) for count in (1, threads))
    return Figure(
        dtype=single.dtype,
        threads=threads,
        decode=single.decode * more.decode / one.decode,
        prefill=single.prefill * more.prefill / one.prefill,
        train=single.train * more.train / one.train,
    )


class _Products:
    """Random weights in one dtype, and the rounds of products that are timed."""

    def __init__(self, shapes: Shapes, dtype: Dtype) -> None:
        self._dtype = dtype
        self._kind = torch.float32 if dtype == "float32" else torch.bfloat16
        num_layers = min(shapes.num_layers, LAYERS_MAX)
        self._num_layers, self._per_layer = shapes.num_layers, len(shapes.layer)
        layers = [shape for _ in range(num_layers) for shape in shapes.layer]
        self._layers = [self._random(*shape) for shape in layers]
        self._head = self._random(-(-shapes.head[0] // HEAD_SHARE), shapes.head[1])
        self._packed_layers = [Linear(weight) for weight in self._layers]
        self._packed_head = Linear(self._head)
        self._inputs = {(rows, c): self._random(rows, c) for rows, c in self._input_shapes()}

    def figure(self, threads: int, clock: Callable[[], float]) -> Figure:
        """Tokens per second by `clock`."""
        torch.set_num_threads(threads)
        layers, head = self._packed_layers, [self._packed_head]
        whole = self._num_layers * self._per_layer / len(layers)
        decode = whole * self._best(clock, self._product, layers, DECODE_ROWS)
        decode += HEAD_SHARE * self._best(clock, self._product, head, DECODE_ROWS)
        prefill = whole * self._best(clock, self._product, layers, PREFILL_ROWS)
        train = self._num_layers * self._best(clock, self._step, self._layers[: self._per_layer], TRAIN_ROWS)
        train += HEAD_SHARE * self._best(clock, self._step, [self._head], DECODE_ROWS)
        return Figure(
            dtype=self._dtype,
            threads=threads,
            decode=DECODE_ROWS / decode,
            prefill=PREFILL_ROWS / prefill,
            train=TRAIN_ROWS / train,
        )

    def _best(
        self, clock: Callable[[], float], work: Callable[[W, torch.Tensor], object], weights: Sequence[W], rows: int
    ) -> float:
        """Seconds of the fastest round over `weights`, after one more in which oneDNN makes its kernels."""
        best, until = float("inf"), 0.0
        with torch.inference_mode():
            for number in range(ROUNDS_MAX):
                began = clock()
                for weight in weights:
                    work(weight, self._inputs[rows, _columns(weight)])
                if number == 0:
                    until = time.perf_counter() + SLICE_S
                    continue
                best = min(best, clock() - began)
                if time.perf_counter() > until:
                    break
        return best

    @staticmethod
    def _product(weight: Linear, x: torch.Tensor) -> object:
        return weight(x)

    @staticmethod
    def _step(weight: torch.Tensor, x: torch.Tensor) -> object:
        """A product and its gradients by input and by weight."""
        y = F.linear(x, weight)
        return y @ weight, y.T @ x

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        return torch.rand(rows, columns).sub_(0.5).to(self._kind)

    def _input_shapes(self) -> set[tuple[int, int]]:
        columns = {weight.shape[1] for weight in (*self._layers, self._head)}
        return {(rows, c) for rows in (DECODE_ROWS, TRAIN_ROWS, PREFILL_ROWS) for c in columns}


def _columns(weight: Linear | torch.Tensor) -> int:
    return weight.in_features if isinstance(weight, Linear) else weight.shape[1]
