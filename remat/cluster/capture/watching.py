"""What a model's forward shows without storage: whether it is a chain, and how it can be split.

One forward runs on the meta device, which computes shapes alone. It tells

- whether each block reads what the one before it made, and nothing else reads that;
- which blocks run the same operations: they are of one kind (`noted_blocks.py`);
- which linear layers of a block are split by columns and which by rows;
- the matrix products, the attention, and which parameters belong before, into and behind blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from remat.cluster.capture.known_values import DataDependence, on_meta
from remat.cluster.capture.model_chain import BlockShape, ChainModel, ChainShape, SplitRole
from remat.cluster.capture.noted_blocks import (
    OTHER_BLOCKS,
    NotedPart,
    are_given_alike,
    hand_on,
    number_kinds,
    why_unrun,
)
from remat.cluster.capture.tokens_over_ranks import AttentionMode, why_unshared
from remat.cluster.parts import ChainPosition, block_position
from remat.graph_capture.costs.cache import flops_of_call
from remat.graph_capture.distributed.ring_attention import HEADS
from remat.graph_capture.errors import CaptureError, RematError
from remat.graph_capture.joint.provenance import source_of_error
from remat.graph_capture.torch_private.core import (
    OpWatcher,
    pytree,
)
from remat.graph_capture.tracing.step_module import apply_loss

_BESIDE_DRAWS = "is beside dropout, which would draw other numbers than on one rank (set it to 0)"


class _WatchedAttention(AttentionMode):
    def __init__(self, watcher: _Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        shape, is_causal = self.watcher.shape, bool(given.get("is_causal"))
        if given.get("dropout_p"):
            shape.unshared = shape.unshared or _BESIDE_DRAWS
        whole = 2 * query.numel() * key.shape[-2] + 2 * query.shape[:-1].numel() * (
            key.shape[-2] * value.shape[-1]
        )
        self.watcher.now.attention_flops += whole // 2 if is_causal else whole
        shape.has_fused_attention = True
        shape.unshared = shape.unshared or why_unshared(query, key, given.get("attn_mask"))
        shape.heads.add((query.shape[HEADS], key.shape[HEADS]))
        # On meta tensors torch would run its open form, as products.
        result = query.new_empty((*query.shape[:-1], value.shape[-1]))
        read = (query, key, value, *given.values())
        self.watcher.note_made(f"attention {is_causal}", pytree.tree_leaves(read), [result])
        return result


_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten._grouped_mm.default")
_NO_CHAIN = "so the model is not a chain of blocks, which a cluster's plan needs"


def watch(chain: ChainModel, *, looks_at_data: bool = False) -> ChainShape:
    """What one forward of the chain shows; `CaptureError` where it is none."""
    try:
        return _forward_watched(chain, looks_at_data)
    except RematError:
        raise
    except Exception as error:
        if not looks_at_data:  # whatever a model makes of a look at values that are not there
            return watch(chain, looks_at_data=True)
        raise CaptureError(
            "let forward and the loss run once on the meta device, whose tensors have no values, "
            f"or plan one rank with remat run --sharding: {_kind(error)} "
            f"({source_of_error(error.__traceback__)}): {str(error).partition(chr(10))[0]}"
        ) from error


def _forward_watched(chain: ChainModel, looks_at_data: bool) -> ChainShape:
    watcher = _Watcher(chain)
    with ExitStack() as hooks, torch.no_grad(), on_meta(looks_at_data):
        for handle in _hooks(watcher, chain):
            hooks.enter_context(handle)
        with _WatchedAttention(watcher), watcher:
            apply_loss(chain.loss_fn, chain.model(*chain.args, **chain.kwargs), chain.target)
    watcher.shape.looks_at_data = looks_at_data
    return watcher.found()


def _hooks(watcher: _Watcher, chain: ChainModel) -> Iterator[Any]:
    index = {id(block): i for i, block in enumerate(chain.blocks.values())}
    for path, module in chain.model.named_modules():
        number = index.get(id(module))
        if number is not None:
            before = partial(watcher.before_block, number)
            yield module.register_forward_pre_hook(before, with_kwargs=True)
        if isinstance(module, nn.Linear):
            yield module.register_forward_pre_hook(partial(watcher.roles.before_linear, path))
            yield module.register_forward_hook(partial(watcher.roles.after_linear, path))
        elif number is None:
            yield module.register_forward_hook(partial(watcher.roles.after_module, path))
        if number is not None:
            yield module.register_forward_hook(partial(watcher.after_block, number))


class _LayerRoles:
    """Writes into `shape` the roles of layers that are called while `is_followed` says so.

    A linear layer that reads what is whole is split by columns, so its result is split; one that
    reads what is split is split by rows, and its result is summed over ranks (Megatron-LM, Shoeybi
    et al. 2019, https://arxiv.org/abs/1909.08053).
    """

    def __init__(self, shape: ChainShape, is_followed: Callable[[], bool]) -> None:
        self._shape, self._is_followed = shape, is_followed
        # The tensors are held, so that no other gets the id of one.
        self._split: dict[int, Tensor] = {}
        self._made_by: dict[int, tuple[str, Tensor]] = {}

    def note(self, read: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        # What is made of a split tensor is split, until a layer by rows sums it.
        if self._is_followed() and any(id(t) in self._split for t in read):
            self._split.update((id(t), t) for t in made)

    def require_whole(self, result: Tensor) -> None:
        """Of a block; else tensor parallel ranks cannot share it."""
        if id(result) in self._split:
            self._shape.unsplit = "its result stays split: no linear layer sums it"

    def before_linear(self, path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_followed():
            return
        read = args[0]
        role: SplitRole = "rows" if id(read) in self._split else "columns"
        if self._shape.roles.setdefault(path, role) != role:
            self._shape.unsplit = f"{path} is called in two ways"
        if role == "columns":
            maker, _ = self._made_by.get(id(read), ("", read))
            self._shape.gathered[maker or path] = bool(maker)

    def after_linear(self, path: str, module: nn.Module, args: Any, result: Tensor) -> None:
        if not self._is_followed():
            return
        if self._shape.roles[path] == "columns":
            self._split[id(result)] = result
        else:
            # `note` has marked it as split; the sum over ranks is whole.
            self._split.pop(id(result), None)
            self._made_by[id(result)] = path, result

    def after_module(self, path: str, module: nn.Module, args: Any, result: Any) -> None:
        if self._is_followed() and isinstance(result, Tensor) and path:
            self._made_by[id(result)] = path, result

    def keep_of_kinds(self, paths: Sequence[str]) -> None:
        """Of one block of each kind, and of what is behind the blocks, which are at `paths`."""
        shape = self._shape
        kept = [f"{paths[number]}." for number, _ in shape.blocks]
        others = [f"{path}." for path in paths if f"{path}." not in kept]
        for known in (shape.roles, shape.gathered):
            for path in [p for p in known if any(p.startswith(one) for one in others)]:
                del known[path]
        for prefix in kept:
            roles = {role for path, role in shape.roles.items() if path.startswith(prefix)}
            if not shape.unsplit and not {"columns", "rows"} <= roles:
                shape.unsplit = "no linear layer of it reads the result of another"


class _Watcher(OpWatcher):
    def __init__(self, chain: ChainModel) -> None:
        super().__init__()
        self.chain, self.paths = chain, list(chain.blocks)
        self.shape = ChainShape()
        # In blocks, and behind the first of them.
        self.roles = _LayerRoles(
            self.shape, lambda: self.inside is not None or self.place == "last"
        )
        parameters = dict(chain.model.named_parameters())
        self.names = {id(p): name for name, p in parameters.items()}
        self.beside: dict[ChainPosition, NotedPart] = {"first": NotedPart(), "last": NotedPart()}
        self.blocks: list[BlockShape] = []
        self.of_block: list[NotedPart] = []
        self.inside: int | None = None
        self.after = -1
        # Here and below the tensors are held, so that no other gets the id of one.
        self.made: dict[int, tuple[int, Tensor]] = {}
        trained = (p for p in parameters.values() if p.requires_grad)
        self.trained: dict[int, Tensor] = {id(p): p for p in trained}
        batch = pytree.tree_leaves((chain.args, chain.kwargs))
        given = (leaf for leaf in batch if isinstance(leaf, Tensor))
        self.of_data = DataDependence([*given, *parameters.values()])
        self.hash = hashlib.sha256()

    @property
    def place(self) -> ChainPosition:
        """Of what runs beside blocks; what lies between two lists of them goes with the last."""
        return "first" if self.after < 0 else "last"

    @property
    def now(self) -> NotedPart:
        return self.beside[self.place] if self.inside is None else self.of_block[self.inside]

    def found(self) -> ChainShape:
        shape = self.shape
        if self.after != len(self.paths) - 1:
            missing = self.paths[self.after + 1]
            raise CaptureError(
                f"{OTHER_BLOCKS}: block {missing} is not called in turn, {_NO_CHAIN}"
            )
        frozen = [n for n, p in self.chain.model.named_parameters() if not p.requires_grad]
        self.hash.update(repr(frozen).encode())
        shape.digest = self.hash.hexdigest()
        for number in hand_on(self.blocks, self.trained.keys()):
            self._hand_over(number)
        number_kinds(shape, list(self.chain.blocks.values()), self.blocks, self.of_block)
        noted = dict(self.beside)
        for kind, (number, _) in enumerate(shape.blocks):
            noted[block_position(kind)] = self.of_block[number]
        for place, one in noted.items():
            shape.parameters[place] = one.parameters
            shape.products_flops[place] = one.products_flops
            shape.attention_flops[place] = one.attention_flops
        self.roles.keep_of_kinds(self.paths)
        blocks = dict(zip(self.paths, self.blocks, strict=True))
        shape.unrun = shape.unrun or why_unrun(shape, blocks)
        return shape

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        if is_drawn:
            self.shape.unshared = self.shape.unshared or _BESIDE_DRAWS
        leaves = pytree.tree_leaves((args, kwargs))
        read = [t for t in leaves if isinstance(t, Tensor)]
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        self._note_reads(func, read)
        self._count(func, args, kwargs, result)
        self.note_made(str(func), leaves, made, is_drawn=is_drawn)
        if func is torch.ops.aten.detach.default:
            self.trained.pop(id(result), None)
        return result

    def note_made(
        self, said: str, leaves: list[Any], made: list[Tensor], *, is_drawn: bool = False
    ) -> None:
        read = [t for t in leaves if isinstance(t, Tensor)]
        self.of_data.note(read, made, is_drawn=is_drawn)
        self.roles.note(read, made)
        if any(id(t) in self.trained for t in read):
            self.trained.update((id(t), t) for t in made if t.is_floating_point())
        if said == "aten.detach.default" and not read[0].is_floating_point():
            return  # of integers it does nothing, and torch itself calls it in some blocks only
        told = [self.now.said(leaf) for leaf in leaves]
        for tensor in made:  # in the order in which they are made
            self.now.said(tensor)
        self.hash.update(f"{self.place} {said} {told}\n".encode())
        # A rate of dropout or a scale costs the same whatever it is.
        alike = [one for one, leaf in zip(told, leaves, strict=True) if type(leaf) is not float]
        self.now.hash.update(f"{said} {alike}\n".encode())

    def _note_reads(self, func: Any, read: list[Tensor]) -> None:
        for tensor in read:
            name = self.names.get(id(tensor))
            if name is not None:
                self.now.parameters.add(name)
            found = self.made.get(id(tensor))
            # What follows the blocks may read the last border as often as it likes.
            if found is None or self._ends_list(found[0]):
                continue
            given = [] if self.inside is None else self.blocks[self.inside].leaves
            if not any(tensor is leaf for leaf in given):
                where = "outside the blocks" if self.inside is None else self.paths[self.inside]
                raise CaptureError(
                    f"{OTHER_BLOCKS}: the result of block {self.paths[found[0]]} is read by "
                    f"{func} {where}, besides the next block, {_NO_CHAIN}"
                )

    def _ends_list(self, number: int) -> bool:
        """Whether the next block, if there is one, is of another list."""
        parents = [path.rpartition(".")[0] for path in self.paths[number : number + 2]]
        return len(parents) == 1 or parents[0] != parents[1]

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        flops = flops_of_call(func, args, kwargs, result)
        if str(func) in _PRODUCTS:
            self.now.products_flops += flops
        elif flops:
            # Batched products are attention that is written out: heads cannot be shared then.
            self.now.attention_flops += flops
            self.shape.has_open_attention = True

    def before_block(
        self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        path = self.paths[number]
        if number != self.after + 1 or self.inside is not None:
            raise CaptureError(f"{OTHER_BLOCKS}: block {path} is not called in turn, {_NO_CHAIN}")
        block = BlockShape(args, kwargs)
        leaves = block.leaves
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not tensors:
            raise CaptureError(f"{OTHER_BLOCKS}: block {path} is given no tensor, {_NO_CHAIN}")
        makers = {i: self.made[id(leaves[i])][0] for i in tensors if id(leaves[i]) in self.made}
        block.borders = tuple(i for i, maker in makers.items() if maker == number - 1)
        # A decoder may be given what the last block of an encoder made, beside its own border.
        if number and (not block.borders or self._ends_list(number - 1)):
            if block.borders[:1] != tuple(tensors[:1]):
                self._begin_list(number)
                block.borders = ()
        elif any(maker < number - 1 for maker in makers.values()):
            self._hand_over(number)
        if not number:
            self.shape.unsent = self.of_data.why_unsent(path, args[1:], kwargs)
        reached = [i for i in tensors if id(leaves[i]) in self.trained]
        block.trains = bool(reached) or any(p.requires_grad for p in module.parameters())
        block.with_gradient = tuple(i for i in reached if i not in block.borders)
        if number and not self.shape.unrun and not are_given_alike(self.blocks[0], block):
            self.shape.unrun = (
                "give all blocks the same arguments, or keep what differs in the block: block "
                f"{path} is given others than block {self.paths[0]}"
            )
        self.blocks.append(block)
        self.of_block.append(NotedPart())
        self.inside = number

    def _begin_list(self, number: int) -> None:
        path, before = self.paths[number], self.paths[number - 1]
        if not self._ends_list(number - 1):
            raise CaptureError(
                f"{OTHER_BLOCKS}: block {path} does not read the result of block {before} "
                f"unchanged, {_NO_CHAIN}"
            )
        self.shape.starts.append(number)
        self.shape.unstaged = (
            f"plan without stages with --pp 1: {path} begins another list of blocks than that of "
            f"{before}, and stages have one"
        )
        self.shape.unrun = (
            f"wrap blocks with fully_shard as the plan says: {path} begins another list of blocks "
            f"than that of {before}, and only one is run"
        )

    def _hand_over(self, number: int) -> None:
        self.shape.unstaged = self.shape.unstaged or (
            "return one tensor from each block, or plan without stages with --pp 1: block "
            f"{self.paths[number]} is given more than the block before it made, which stages do "
            "not send"
        )

    def after_block(self, number: int, module: nn.Module, args: Any, result: Any) -> None:
        block = self.blocks[number]
        block.result = result
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not tensors:
            raise CaptureError(
                f"return a tensor from block {self.paths[number]}: it returns a "
                f"{_kind(result)}, {_NO_CHAIN}"
            )
        if number == 0:
            self.shape.border = tensors[0]
        self.roles.require_whole(tensors[0])
        # What it was given and hands on is not its own.
        own = {id(leaf) for leaf in block.leaves}
        self.made.update((id(t), (number, t)) for t in tensors if id(t) not in own)
        self.inside, self.after = None, number


def _kind(value: object) -> str:
    return type(value).__name__
