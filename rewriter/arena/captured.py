"""A planned step as two CUDA graphs, forward and backward, which repeat it without its host time.

A graph repeats kernels at the addresses at which they ran when it was captured. Both graphs take
their memory from one pool of their own, in which each result has its place for good, as in an
arena. The first step runs as usual, the second is captured, and later ones are replays.

In place of what forward saves, autograd gets a number: a graph has its addresses already, and the
pool reuses them in backward. So a backward without the replay of its own forward is refused.
Related: torchtitan's and Inductor's CUDA graphs (`torch._inductor.cudagraph_trees`).
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from remat.graph_capture.devices.memory import is_out_of_memory
from remat.graph_capture.errors import ArenaError, StateChangedError
from remat.graph_capture.joint.nodes import is_view
from remat.graph_capture.torch_private.core import clear_cublas_workspaces, storage_uses
from remat.graph_capture.tracing.option_pairs import require_compatible
from remat.rewriter.arena.capturable import require_capturable
from remat.rewriter.compiled import CompiledStep, PassKind
from remat.rewriter.graphs.codegen import Boxed
from remat.rewriter.graphs.rng import FirstDraws, GraphDraws, StreamPlace, run_with_rng_state
from remat.rewriter.user_module.module import RematModule

_MARK = 0x72656D6174  # begins what autograd gets in place of saved values
_MANY = 3  # captures, after which the user is told that addresses change


class _Places(NamedTuple):
    """Where things are among the arguments and results of the two graphs."""

    state: list[int]  # forward's arguments that are parameters and buffers
    batch: list[int]
    saved_inputs: dict[int, int]  # of what forward saves, the places of its inputs and their views
    n_saved: int

    @classmethod
    def of(cls, step: CompiledStep) -> _Places:
        inputs = step.forward.graph.find_nodes(op="placeholder")
        kinds = [type(one.meta.get("desc")).__name__ for one in inputs]
        state = [i for i, one in enumerate(kinds) if one in ("ParamAOTInput", "BufferAOTInput")]
        given = [i for i, one in enumerate(inputs) if isinstance(one.meta.get("val"), Tensor)]
        batch = [i for i in given if i not in state]
        results: Any = step.forward.graph.output_node().args[0]
        saved = [_input_of(one) for one in results[step.memory.n_results :]]
        places = {i: inputs.index(one) for i, one in enumerate(saved) if one in inputs}
        return cls(state, batch, places, len(saved))


def _input_of(node: fx.Node) -> fx.Node:
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


class _Buffer:
    """A tensor at a fixed address, for what comes from elsewhere at each step."""

    def __init__(self, like: Tensor) -> None:
        self.own = torch.empty_strided(
            like.shape, like.stride(), dtype=like.dtype, device=like.device
        )
        self._whole = _whole(self.own)

    def fill(self, given: Tensor) -> None:
        self._whole.copy_(_whole(given.detach()))


def _whole(tensor: Tensor) -> Tensor:
    # In one dimension, as a tensor may show an element several times, or not all of its memory.
    last = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,))


def _layouts(tensors: Sequence[Tensor]) -> list[Any]:
    return [(t.shape, t.stride(), t.dtype, t.device, t.is_conj(), t.is_neg()) for t in tensors]


@dataclass
class GraphCounts:
    """Forwards by how they ran: without a graph, captured, replayed (captured ones too)."""

    without: int = 0
    captured: int = 0
    replayed: int = 0


@dataclass(eq=False)
class _Pair:
    """Both graphs, for one set of addresses; `uses` counts holders of gradients in the pool."""

    forward: _Graph
    buffers: list[_Buffer]
    results: list[Any]
    saved: list[Any]
    backward: _Graph | None = None
    tangents: list[_Buffer] = field(default_factory=list[_Buffer])
    tangent_facts: list[Any] = field(default_factory=list[Any])
    gradients: list[Any] = field(default_factory=list[Any])
    uses: dict[int, tuple[Tensor, int]] = field(default_factory=dict[int, tuple[Tensor, int]])


class _Graph:
    """One captured pass, and the draws that it makes again."""

    def __init__(self, draws: GraphDraws) -> None:
        self.draws, self.graph = draws, torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], Any], pool: Any, stream: Any) -> list[Any]:
        clear_cublas_workspaces()  # others may free one that a graph has the address of
        how: dict[str, Any] = {"stream": stream, "capture_error_mode": "thread_local"}
        try:
            with self.draws.captured(self.graph), torch.cuda.graph(self.graph, pool=pool, **how):
                return list(run())
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise ArenaError(
                f"leave out cuda_graphs=True: a kernel of this step cannot be captured ({error})"
            ) from error
        finally:
            clear_cublas_workspaces()  # those of the pool stay there, for replays

    def replay(self, began: StreamPlace) -> None:
        self.draws.put(began)
        self.graph.replay()


class StepGraphs:
    """CUDA graphs of one rewritten module and its copies, until it is closed.

    They are captured anew where addresses have changed. What cannot be repeated exactly is an
    error: a second backward, a backward after another forward, or one that begins otherwise.
    """

    def __init__(self, step: CompiledStep, device: torch.device) -> None:
        self._memory, self._device = step.memory, device
        self._places, self._constants = _Places.of(step), _bound_tensors(step)
        graphs = (step.forward.graph, step.backward.graph)
        draws = [g.find_nodes(op="call_function", target=run_with_rng_state) for g in graphs]
        self._n_again = [len(found) for found in draws]
        self._stream: Any = torch.cuda.Stream(device)
        self._lock, self._first_draws = threading.Lock(), FirstDraws()
        self._began = StreamPlace(0, 0)
        self._of: Any = None  # addresses that hold
        self._warm: set[PassKind] = set()
        self._pair: _Pair | None = None
        self._pool: Any = None
        self._forwards, self._pending = 0, 0
        self.counts = GraphCounts()
        step.memory.source = self

    def close(self) -> None:
        """Give the pool back; steps run as before. Results and gradients stay valid."""
        if self._memory.source is self:
            self._memory.source = None
        self._pair = self._pool = self._of = None

    def run(self, phase: PassKind, graph: Boxed, args: list[Any]) -> Any:
        if torch.cuda.is_current_stream_capturing():  # into a graph of the user's
            return graph(args)
        with self._lock:
            return self._forward(graph, args) if phase == "forward" else self._backward(graph, args)

    def _forward(self, graph: Boxed, args: list[Any]) -> Any:
        self._require_addresses(args)
        self._pending = 0
        if self._pair is not None:
            self._move_gradients_out(self._pair, args)
        elif len(self._warm) < 2:
            return self._warm_forward(graph, args)
        if any(self._n_again):
            self._began = StreamPlace.now(self._device)
        if self._pair is None:
            self._pair = self._captured_forward(graph, args)
        return self._replayed_forward(self._pair, args)

    def _require_addresses(self, args: list[Any]) -> None:
        """Forget graphs of other addresses, so that new ones are captured."""
        state = [args[i].data_ptr() for i in self._places.state]
        constants = [one.data_ptr() for one in self._constants]
        found = state, constants, _layouts([args[i] for i in self._places.batch])
        if found == self._of:
            return
        if self._pair is not None and self.counts.captured == _MANY:
            warnings.warn(
                "leave out cuda_graphs=True, or keep parameters and buffers where they are: their "
                f"addresses have changed, so this step's graphs are captured for the {_MANY + 1}th "
                "time. This is said once",
                stacklevel=2,
            )
        self._of, self._pair, self._pool = found, None, None
        self._warm.clear()

    def _warm_forward(self, graph: Boxed, args: list[Any]) -> Any:
        self._warm.add("forward")
        self.counts.without += 1
        if not any(self._n_again):
            return graph(args)
        with self._first_draws.noted(StreamPlace.now(self._device)):
            return graph(args)

    def _captured_forward(self, graph: Boxed, args: list[Any]) -> _Pair:
        self._pool = torch.cuda.graph_pool_handle()
        buffers = [_Buffer(args[i]) for i in self._places.batch]
        given = [one.detach() if isinstance(one, Tensor) else one for one in args]
        for i, buffer in zip(self._places.batch, buffers, strict=True):
            given[i] = buffer.own
        forward = _Graph(GraphDraws(self._device, self._n_again[0], self._first_draws))
        found = forward.capture(lambda: graph(given), self._pool, self._stream)
        self.counts.captured += 1
        n_results = self._memory.n_results
        return _Pair(forward, buffers, found[:n_results], found[n_results:])

    def _replayed_forward(self, pair: _Pair, args: list[Any]) -> list[Any]:
        with self._on_stream():
            for i, buffer in zip(self._places.batch, pair.buffers, strict=True):
                buffer.fill(args[i])
            pair.forward.replay(self._began)
        self.counts.replayed += 1
        self._forwards += 1
        self._pending = self._forwards
        number = torch.tensor([_MARK, self._forwards])
        # Inputs themselves, as autograd refuses a backward after they were changed.
        inputs = self._places.saved_inputs
        saved = [args[inputs[i]] if i in inputs else number for i in range(self._places.n_saved)]
        return [*_each(pair.results, _copied), *saved]

    @contextlib.contextmanager
    def _on_stream(self) -> Generator[None]:
        # A pass may be called from any stream, and the next from another: the pool is one.
        calling: Any = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(calling)
        with torch.cuda.stream(self._stream):
            yield
        calling.wait_stream(self._stream)

    def _backward(self, graph: Boxed, args: list[Any]) -> Any:
        number = self._number_in(args)
        if number is None:
            self._warm.add("backward")
            return graph(args)
        pair = self._pair
        if pair is None or number != self._pending:
            raise ArenaError(
                "call backward once for each forward, before the next forward, or leave out "
                "cuda_graphs=True: the graphs of this step have written over what its forward "
                "saved"
            )
        self._require_inputs(args)
        self._pending = 0
        tangents = args[self._places.n_saved :]
        if pair.backward is None:
            self._capture_backward(pair, graph, tangents)
        elif _layouts(tangents) != pair.tangent_facts:
            raise ArenaError(
                "give loss_fn, so that the loss is part of the step, or leave out "
                "cuda_graphs=True: backward begins with gradients of other strides or types than "
                "when its graph was captured"
            )
        assert pair.backward is not None
        with self._on_stream():
            for buffer, tangent in zip(pair.tangents, tangents, strict=True):
                buffer.fill(tangent)
            pair.backward.replay(self._began)
        own = pair.uses  # all others lie in what the next step writes to
        return _each(pair.gradients, lambda g: g.detach() if _storage(g) in own else _copied(g))

    def _number_in(self, args: list[Any]) -> int | None:
        for i in range(self._places.n_saved):
            if i not in self._places.saved_inputs:
                one = args[i]
                is_number = one.dtype is torch.int64 and one.shape == (2,) and one.is_cpu
                found = one.tolist() if is_number else [0, 0]
                return found[1] if found[0] == _MARK else None
        return None  # it saves inputs alone, and runs without a graph

    def _require_inputs(self, args: list[Any]) -> None:
        held = dict(zip(self._places.state, self._of[0], strict=True))
        for i, place in self._places.saved_inputs.items():
            if place in held and args[i].data_ptr() != held[place]:
                raise StateChangedError(
                    "replace parameters and buffers after backward: one was given other memory "
                    "between forward and backward, which a CUDA graph reads at its old address"
                )

    def _capture_backward(self, pair: _Pair, graph: Boxed, tangents: list[Any]) -> None:
        pair.tangents = [_Buffer(one) for one in tangents]
        pair.tangent_facts = _layouts(tangents)
        given = [*pair.saved, *(one.own for one in pair.tangents)]
        not_own = {_storage(one) for one in given if isinstance(one, Tensor)}
        pair.saved = []  # backward drops each as planned, and the pool reuses its place
        pair.backward = _Graph(GraphDraws(self._device, self._n_again[1], self._first_draws))
        pair.gradients = pair.backward.capture(lambda: graph(given), self._pool, self._stream)
        made = [g for g in pair.gradients if isinstance(g, Tensor) and _storage(g) not in not_own]
        pair.uses = {_storage(one): (one, storage_uses(one)) for one in made}

    def _move_gradients_out(self, pair: _Pair, args: list[Any]) -> None:
        """Let gradients that were given out have memory of their own, as accumulation needs."""
        held = {key for key, (one, uses) in pair.uses.items() if storage_uses(one) > uses}
        for one in (args[i] for i in self._places.state) if held else ():
            gradient = one.grad if one.is_leaf else None
            if gradient is not None and _storage(gradient) in held:
                gradient.data = gradient.clone()
        if any(storage_uses(pair.uses[key][0]) > pair.uses[key][1] for key in held):
            raise ArenaError(
                "clone the gradients that you keep into the next step, or leave out "
                "cuda_graphs=True: something other than .grad of a parameter holds gradients of "
                "the last step, which this step's graphs would write over"
            )

    def __repr__(self) -> str:
        return f"StepGraphs({self.counts})"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bound_tensors(step: CompiledStep) -> list[Tensor]:
    pairs = [(gm, n) for gm in (step.forward, step.backward) for n in gm.graph.nodes]
    found = [getattr(gm, str(n.target)) for gm, n in pairs if n.op == "get_attr"]
    return [one for one in found if isinstance(one, Tensor)]


def _copied(tensor: Tensor) -> Tensor:
    buffer = _Buffer(tensor)
    buffer.fill(tensor)
    return buffer.own


def _each(results: list[Any], made: Callable[[Tensor], Tensor]) -> list[Any]:
    # What stands twice stays one tensor: autograd then copies it for one of its places.
    known = {id(one): made(one) if isinstance(one, Tensor) else one for one in results}
    return [known[id(one)] for one in results]


def capture_steps(module: nn.Module) -> StepGraphs:
    """Have training steps of `module` captured, from the second one on."""
    if not isinstance(module, RematModule):  # of a range of sizes
        require_compatible(dynamic=True, cuda_graphs=True)
    assert isinstance(module, RematModule)
    step = module._remat_compiled_step
    if step.memory.source is not None:
        raise ArenaError("close the module's arena, or its graphs, first: it has one already")
    return StepGraphs(step, require_capturable(module._remat_original_module, step))
