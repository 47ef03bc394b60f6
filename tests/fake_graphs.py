"""CUDA graphs without a device: what torch does on the CPU while one is captured, and at replays.

While a graph is captured nothing is computed: results hold garbage. Each lies in memory of the
fake pool, and a replay runs the recorded ops on those addresses. Where a result was dropped, a
replay fills its memory with garbage, as the pool may have given it to another.
Random ops draw from `FakeGenerator`s, which have a seed and an offset, as those of a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from remat.graph_capture.joint.nodes import written_arguments
from remat.graph_capture.torch_private.core import OpWatcher, pytree, unset_fake_temporarily
from remat.rewriter.arena import capturable, captured
from remat.rewriter.graphs import rng
from tests.fake_cuda import FakeCuda, install

_GARBAGE = 0xA5
_PER_DRAW = 4  # by how much a draw moves an offset


class _State:
    def __init__(self, seed: int = 0, offset: int = 0) -> None:
        self.seed, self.offset, self.in_graph = seed, offset, 0


class FakeGenerator:
    def __init__(self, state: _State) -> None:
        self.of = state

    def clone_state(self) -> FakeGenerator:
        return FakeGenerator(_State(self.of.seed, self.of.offset))

    def graphsafe_get_state(self) -> FakeGenerator:
        return FakeGenerator(self.of)

    def graphsafe_set_state(self, other: FakeGenerator) -> None:
        self.of = other.of

    def get_state(self) -> Tensor:
        with unset_fake_temporarily():
            words = np.array([self.of.seed, self.of.offset], np.int64)
            return torch.from_numpy(words.view(np.uint8))

    def set_state(self, state: Tensor) -> None:
        self.of.seed, self.of.offset = state.numpy().view(np.int64).tolist()


class _Raw(NamedTuple):
    """A tensor by its address alone."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Raw:
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def tensor(self) -> Tensor:
        if 0 in self.shape:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        last = sum((n - 1) * by for n, by in zip(self.shape, self.strides, strict=True))
        block = (ctypes.c_byte * ((last + 1) * self.dtype.itemsize)).from_address(self.address)
        return torch.frombuffer(block, dtype=self.dtype).as_strided(self.shape, self.strides)


def _raw(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, _Raw.of, tree)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class FakeGraph:
    """In the place of `torch.cuda.CUDAGraph`; `blocks` is the memory of its part of the pool."""

    runtime: FakeGraphs

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.states: list[_State] = []
        self.moves: list[int] = []
        self.blocks: list[Any] = []
        self.n_replays = 0

    def register_generator_state(self, generator: FakeGenerator) -> None:
        assert self.runtime.capturing is None, "a generator is registered before the capture"
        self.states.append(generator.of)

    def begin(self) -> None:
        self.states.append(self.runtime.default.of)
        for state in self.states:
            state.in_graph = 0

    def end(self) -> None:
        self.moves = [state.in_graph for state in self.states]

    def replay(self) -> None:
        assert self.runtime.capturing is None
        self.n_replays += 1
        with self.runtime.aside():
            for step in self.steps:
                step()
        for state, moved in zip(self.states, self.moves, strict=True):
            state.offset += moved

    def record(self, func: Any, args: Any, kwargs: Any, outputs: Any, draw: Any) -> None:
        given, made = _raw((args, kwargs)), [o for o in _leaves(outputs) if isinstance(o, Tensor)]
        raw_made = [_Raw.of(one) for one in made]

        def step() -> None:
            arguments, named = pytree.tree_map_only(_Raw, _Raw.tensor, given, is_leaf=_is_raw)
            if draw is not None:
                state, offset = draw
                torch.manual_seed(hash((state.seed, state.offset + offset)))
            found = [o for o in _leaves(func(*arguments, **named)) if isinstance(o, Tensor)]
            for place, one in zip(raw_made, found, strict=True):
                if one.data_ptr() != place.address:
                    place.tensor().copy_(one)

        self.steps.append(step)

    def place(self, tensor: Tensor) -> Tensor:
        """The same tensor in memory of the pool, which is garbage from when it is dropped."""
        n_bytes = max(1, tensor.untyped_storage().nbytes())
        block = bytearray([_GARBAGE]) * n_bytes
        self.blocks.append(block)
        shown = (ctypes.c_byte * n_bytes).from_buffer(block)
        whole = torch.frombuffer(shown, dtype=torch.uint8)
        weakref.finalize(shown, self._dropped, ctypes.addressof(shown), n_bytes)
        if tensor.untyped_storage().nbytes() == 0:
            return tensor
        return torch.empty(0, dtype=tensor.dtype).set_(
            whole.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    def _dropped(self, address: int, n_bytes: int) -> None:
        if self.runtime.capturing is self:
            self.steps.append(lambda: ctypes.memset(address, _GARBAGE, n_bytes) and None)


def _is_raw(one: Any) -> bool:
    return isinstance(one, _Raw)


def _leaves(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


class FakeGraphs(OpWatcher):
    """The runtime: `graphs` are those that were captured, in order; `pools` those asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.default = FakeGenerator(_State(7, 0))
        self.capturing: FakeGraph | None = None
        self.graphs: list[FakeGraph] = []
        self.pools: list[Any] = []
        self.log: list[str] = []
        self._is_aside = False

    @contextlib.contextmanager
    def aside(self) -> Generator[None]:
        before, self._is_aside = self._is_aside, True
        state = torch.get_rng_state()
        try:
            yield
        finally:
            self._is_aside = before
            torch.set_rng_state(state)

    @contextlib.contextmanager
    def capture(self, graph: FakeGraph, pool: Any, stream: Any, **_: Any) -> Generator[None]:
        assert pool in self.pools
        assert stream is not None
        graph.begin()
        self.log.append("capture")
        self.graphs.append(graph)
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None
            graph.end()

    def new_pool(self) -> Any:
        self.pools.append(object())
        return self.pools[-1]

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_aside:
            return func(*args, **kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags and not _is_idle(func, args)
        if self.capturing is not None:
            return self._recorded(self.capturing, func, args, kwargs, draws)
        if not draws:
            return func(*args, **kwargs)
        state = self.default.of
        with self.aside():
            torch.manual_seed(hash((state.seed, state.offset)))
            found = func(*args, **kwargs)
        state.offset += _PER_DRAW
        return found

    def _recorded(
        self, graph: FakeGraph, func: Any, args: tuple[Any, ...], kwargs: Any, draws: bool
    ) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        written = [w for w in written_arguments(func, args, kwargs) if isinstance(w, Tensor)]
        before = [one.clone() for one in written]
        with self.aside():
            shows = any(one.alias_info is not None for one in func._schema.returns)
            given = (args, kwargs) if written or shows else _safe((args, kwargs))
            found = func(*given[0], **given[1])
            for one, was in zip(written, before, strict=True):
                one.copy_(was)
        known = {_storage(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        places: dict[int, Tensor] = {}

        def placed(one: Tensor) -> Tensor:
            if _storage(one) in known:
                return one
            return places.setdefault(id(one), graph.place(one))

        with self.aside():
            given = pytree.tree_map_only(Tensor, placed, found)
        draw = None
        if draws:
            state = self.default.of
            draw = state, state.in_graph
            state.in_graph += _PER_DRAW
        if places or written:
            graph.record(func, args, kwargs, given, draw)
        return given

    def get_rng_state(self, *_: Any) -> Tensor:
        assert self.capturing is None, "torch tells no state while a graph is captured"
        return self.default.get_state()

    def set_rng_state(self, state: Tensor, *_: Any) -> None:
        assert self.capturing is None
        self.default.set_state(state)


def _is_idle(func: Any, args: tuple[Any, ...]) -> bool:
    named = zip((one.name for one in func._schema.arguments), args, strict=False)
    return any(name in ("p", "dropout_p") and given == 0.0 for name, given in named)


def _safe(tree: Any) -> Any:
    # Indices that are garbage would end the process.
    def safe(one: Tensor) -> Tensor:
        return one if one.is_floating_point() else torch.zeros_like(one)

    return pytree.tree_map_only(Tensor, safe, tree)


class _Stream:
    def __init__(self, runtime: FakeGraphs, name: str) -> None:
        self.runtime, self.name = runtime, name

    def wait_stream(self, other: _Stream) -> None:
        self.runtime.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    """CUDA graphs of what runs on the CPU, in steps within it."""
    runtime = FakeGraphs()
    install(FakeCuda(), monkeypatch)
    FakeGraph.runtime = runtime
    main = _Stream(runtime, "main")
    answers: dict[str, Any] = {
        "CUDAGraph": FakeGraph,
        "graph": lambda graph, pool, stream, **more: runtime.capture(graph, pool, stream, **more),
        "graph_pool_handle": runtime.new_pool,
        "Stream": lambda *_: _Stream(runtime, "own"),
        "current_stream": lambda *_: main,
        "default_generators": (runtime.default,),
        "get_rng_state": runtime.get_rng_state,
        "set_rng_state": runtime.set_rng_state,
        "is_current_stream_capturing": lambda: runtime.capturing is not None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(captured, "clear_cublas_workspaces", lambda: None)
    monkeypatch.setattr(capturable, "_CAPTURED_ON", ["cpu"])
    monkeypatch.setattr(rng, "is_cuda", lambda _: True)  # states are those of a device
    monkeypatch.setattr(rng, "form_with_generator", lambda _: None)
    monkeypatch.setattr(rng, "_moves", {})
    return runtime
