"""What a model's forward shows without storage: whether it is a chain, and how it can be split.

One forward runs on the meta device, which computes shapes alone. It tells

- whether each block reads what the one before it made, and nothing else reads that;
- which linear layers of a block are split by columns and which by rows. One that reads what is
  whole is split by columns, so its result is split; one that reads what is split is split by rows,
  and its result is summed over ranks (Megatron-LM, Shoeybi et al. 2019,
  https://arxiv.org/abs/1909.08053);
- the matrix products, the attention, and which parameters belong before, into and behind blocks.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from remat.cluster.capture.model_chain import ChainModel, ChainShape, SplitRole
from remat.cluster.mesh import shares_heads
from remat.cluster.parts import ChainPosition
from remat.graph_capture.costs.cache import flops_of_call
from remat.graph_capture.distributed.dtensors import is_distributed
from remat.graph_capture.distributed.ring_attention import HEADS, TOKENS, ring_attention
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.torch_private.core import (
    CallWatcher,
    OpWatcher,
    all_to_all_autograd,
    compiling_and_exporting,
    pytree,
)
from remat.graph_capture.tracing.step_module import apply_loss

_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class AttentionMode(CallWatcher):
    """Has `attend` in the place of torch's fused attention; all other calls are torch's."""

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self.attend(**dict(zip(_POSITIONAL, args, strict=False)), **kwargs)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        """What a call returns; `given` are its other arguments."""


# Attention whose heads context parallel ranks share.
#
# Each rank has a part of the tokens of each sequence. Before attention ranks exchange tokens for
# heads, and behind it they exchange them back (DeepSpeed Ulysses, Jacobs et al. 2023,
# https://arxiv.org/abs/2309.14509). So causal attention is as much work on each rank, and a head
# has the bits that it has on one rank alone. Where there are more ranks than heads of keys, each
# such head goes to several ranks. More ranks than that form rings, round which tokens go.


WAY_OUT = "plan with --cp 1"


def _why_unshared(query: Tensor, key: Tensor, mask: Tensor | None) -> str:
    """What keeps context parallel ranks from sharing a call of attention; empty for nothing."""
    if mask is not None:
        return "has a mask, and a rank has only the mask of its own tokens"
    if query.dim() != key.dim() or query.dim() != 4:
        return "takes tensors other than [batch, heads, tokens, width]"
    if is_distributed(query):
        return "takes DTensors (use_local_output=True in tp_plan gives it plain tensors)"
    if query.shape[TOKENS] != key.shape[TOKENS]:
        return "has keys of other tokens than its queries"
    return ""


def require_shared(query: Tensor, key: Tensor, mask: Tensor | None, ranks: int) -> None:
    why = _why_unshared(query, key, mask)
    heads = (query.shape[HEADS], key.shape[HEADS])
    if not why and not shares_heads(heads, 1, ranks):
        why = f"has {heads[0]} heads of queries and {heads[1]} of keys on each rank"
    if why:
        raise CaptureError(
            f"{WAY_OUT}: {ranks} context parallel ranks cannot share this attention, which {why}"
        )


class HeadsOverRanks(AttentionMode):
    """Torch's fused attention over all tokens, of this rank's share of the heads.

    `ring`: the ranks round which tokens go, or None. Each group of ranks that share heads has two
    parts of a sequence then, which stand one after the other on each rank.
    """

    def __init__(self, group: Any, ring: Any = None) -> None:
        super().__init__()
        self.group, self.n, self.ring = group, dist.get_world_size(group), ring
        self.parts = 1 if ring is None else 2

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        """This rank's tokens of the attention, [batch, heads, tokens, width]."""
        require_shared(query, key, given.get("attn_mask"), self.n)
        copies = max(self.n // key.shape[HEADS], 1)
        if copies > 1:
            key, value = (t.repeat_interleave(copies, HEADS) for t in (key, value))
        query, key, value = (self._to_heads(t) for t in (query, key, value))
        found = self._of_heads(query, key, value, given)
        parts = found.unflatten(TOKENS, (self.parts, self.n, -1)).movedim(3, 0)
        tokens_of_all = self._exchanged(parts).transpose(0, 1)
        return tokens_of_all.flatten(3, 4).flatten(1, 2)

    def _to_heads(self, t: Tensor) -> Tensor:
        """From all heads of own tokens to all tokens of own heads."""
        batch, heads, tokens, width = t.shape
        parts = t.reshape(batch, self.n, heads // self.n, tokens, width).transpose(0, 1)
        found = self._exchanged(parts).unflatten(3, (self.parts, -1)).movedim(0, 3)
        return found.reshape(batch, heads // self.n, self.n * tokens, width)

    def _of_heads(self, query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> Tensor:
        if self.ring is None:
            return nn.functional.scaled_dot_product_attention(query, key, value, **given)
        if given.get("dropout_p"):
            raise CaptureError(
                f"set dropout of attention to 0, or {WAY_OUT}: tokens go round a ring of ranks, "
                "whose draws are not those of one rank"
            )
        if query.is_cuda and query.dtype == torch.float32:
            raise CaptureError(
                f"train in bfloat16, with mp_policy=, or {WAY_OUT}: tokens go round a ring of "
                "ranks by flash attention, which CUDA lacks in float32"
            )
        causal, scale = bool(given.get("is_causal")), given.get("scale")
        ranks, name = dist.get_world_size(self.ring), self.ring.group_name
        return ring_attention(query, key, value, causal, scale, ranks, name)[0]

    def _exchanged(self, t: Tensor) -> Tensor:
        """The i-th part of it goes to the i-th rank."""
        if self.n == 1:
            return t
        return all_to_all_autograd(t.contiguous().flatten(), None, None, self.group).view(t.shape)


class _WatchedAttention(AttentionMode):
    def __init__(self, watcher: _Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        shape, is_causal = self.watcher.shape, bool(given.get("is_causal"))
        # Blocks are equal, so the first one stands for all.
        if self.watcher.inside in (None, 0):
            whole = 2 * query.numel() * key.shape[-2] + 2 * query.shape[:-1].numel() * (
                key.shape[-2] * value.shape[-1]
            )
            shape.attention_flops += whole // 2 if is_causal else whole
            shape.has_fused_attention = True
            shape.unshared = shape.unshared or _why_unshared(query, key, given.get("attn_mask"))
            shape.heads.add((query.shape[HEADS], key.shape[HEADS]))
        # On meta tensors torch would run its open form, as products.
        result = query.new_empty((*query.shape[:-1], value.shape[-1]))
        if id(query) in self.watcher.split:
            self.watcher.split[id(result)] = result
        return result


_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten._grouped_mm.default")
_NO_CHAIN = "so the model is not a chain of blocks, which a cluster's plan needs"


def watch(chain: ChainModel) -> ChainShape:
    """What one forward of the chain shows; `CaptureError` where it is none."""
    watcher = _Watcher(chain)
    with ExitStack() as hooks, torch.no_grad(), torch.device("meta"):
        for handle in _hooks(watcher, chain):
            hooks.enter_context(handle)
        # Meta tensors have no values: code that looks at them leaves that out where it is compiled.
        with compiling_and_exporting(True, False), _WatchedAttention(watcher), watcher:
            apply_loss(chain.loss_fn, chain.model(*chain.args, **chain.kwargs), chain.target)
    return watcher.found()


def _hooks(watcher: _Watcher, chain: ChainModel) -> Iterator[Any]:
    index = {id(block): i for i, block in enumerate(chain.blocks.values())}
    for path, module in chain.model.named_modules():
        number = index.get(id(module))
        if number is not None:
            before = partial(watcher.before_block, number)
            yield module.register_forward_pre_hook(before, with_kwargs=True)
        if isinstance(module, nn.Linear):
            yield module.register_forward_pre_hook(partial(watcher.before_linear, path))
            yield module.register_forward_hook(partial(watcher.after_linear, path))
        elif number is None:
            yield module.register_forward_hook(partial(watcher.after_module, path))
        if number is not None:
            yield module.register_forward_hook(partial(watcher.after_block, number))


class _Watcher(OpWatcher):
    def __init__(self, chain: ChainModel) -> None:
        super().__init__()
        self.chain, self.paths = chain, list(chain.blocks)
        self.shape = ChainShape()
        self.names = {id(p): name for name, p in chain.model.named_parameters()}
        self.inside: int | None = None
        self.after = -1
        # Here and below the tensors are held, so that no other gets the id of one.
        self.borders: dict[int, tuple[int, Tensor]] = {}
        self.split: dict[int, Tensor] = {}
        self.made_by: dict[int, tuple[str, Tensor]] = {}
        self.hash = hashlib.sha256()

    @property
    def place(self) -> ChainPosition:
        if self.inside is not None:
            return "block"
        return "last" if self.after == len(self.paths) - 1 else "first"

    @property
    def is_followed(self) -> bool:
        """Whether roles are looked for here: in one block of all, and behind the last."""
        return self.inside == 0 or self.place == "last"

    def found(self) -> ChainShape:
        shape = self.shape
        if self.after != len(self.paths) - 1:
            missing = self.paths[self.after + 1]
            raise CaptureError(f"block {missing} is not called in turn, {_NO_CHAIN}")
        shape.digest = self.hash.hexdigest()
        of_block = [r for path, r in shape.roles.items() if path.startswith(self.paths[0])]
        if not shape.unsplit and not {"columns", "rows"} <= set(of_block):
            shape.unsplit = "no linear layer of it reads the result of another"
        return shape

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        read = [t for t in leaves if isinstance(t, Tensor)]
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        self._note_reads(func, read)
        self._count(func, args, kwargs, result)
        # What is made of a split tensor is split, until a layer by rows sums it.
        if self.is_followed and any(id(t) in self.split for t in read):
            self.split.update((id(t), t) for t in made)
        if self.inside in (None, 0):
            told = [
                f"{leaf.dtype}{tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
                for leaf in leaves
            ]
            self.hash.update(f"{self.place} {func} {told}\n".encode())
        return result

    def _note_reads(self, func: Any, read: list[Tensor]) -> None:
        for tensor in read:
            name = self.names.get(id(tensor))
            if name is not None and self.inside in (None, 0):
                self.shape.parameters[self.place].add(name)
            border = self.borders.get(id(tensor))
            # What follows the blocks may read the last border as often as it likes.
            if border is None or border[0] == len(self.paths) - 1:
                continue
            if self.inside != border[0] + 1:
                where = "outside the blocks" if self.inside is None else self.paths[self.inside]
                raise CaptureError(
                    f"the result of block {self.paths[border[0]]} is read by {func} {where}, "
                    f"besides the next block, {_NO_CHAIN}"
                )

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if self.inside not in (None, 0):
            return
        flops = flops_of_call(func, args, kwargs, result)
        if str(func) in _PRODUCTS:
            self.shape.products_flops[self.place] += flops
        elif flops:
            # Batched products are attention that is written out: heads cannot be shared then.
            self.shape.attention_flops += flops
            self.shape.has_open_attention = True

    def before_block(
        self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        path = self.paths[number]
        if number != self.after + 1 or self.inside is not None:
            raise CaptureError(f"block {path} is not called in turn, {_NO_CHAIN}")
        if not (args and isinstance(args[0], Tensor)):
            raise CaptureError(f"block {path} has no tensor as its first argument, {_NO_CHAIN}")
        if number == 0:
            self.shape.block_args, self.shape.block_kwargs = args, kwargs
        elif self.borders.get(id(args[0]), (None,))[0] != number - 1:
            raise CaptureError(
                f"block {path} does not read the result of block {self.paths[number - 1]} "
                f"unchanged, {_NO_CHAIN}"
            )
        else:
            self._require_same(number, args, kwargs)
        self.inside = number

    def _require_same(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shape = self.shape
        known = pytree.tree_leaves((shape.block_args[1:], shape.block_kwargs))
        given = pytree.tree_leaves((args[1:], kwargs))
        if len(known) != len(given) or any(
            # Tensors have no values here to compare.
            a is not b and (isinstance(a, Tensor) or a != b)
            for a, b in zip(known, given, strict=True)
        ):
            raise CaptureError(
                "give all blocks the same arguments, or keep what differs in the block: block "
                f"{self.paths[number]} is given others than block {self.paths[0]}"
            )

    def after_block(self, number: int, module: nn.Module, args: Any, result: Any) -> None:
        if not isinstance(result, Tensor):
            raise CaptureError(
                f"return one tensor from block {self.paths[number]}: it returns a "
                f"{type(result).__name__}, {_NO_CHAIN}"
            )
        if number == 0:
            self.shape.border = result
            if id(result) in self.split:
                self.shape.unsplit = "its result stays split: no linear layer sums it"
        self.borders[id(result)] = number, result
        self.inside, self.after = None, number

    def before_linear(self, path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.is_followed:
            return
        read = args[0]
        role: SplitRole = "rows" if id(read) in self.split else "columns"
        if self.shape.roles.setdefault(path, role) != role:
            self.shape.unsplit = f"{path} is called in two ways"
        if role == "columns":
            maker, _ = self.made_by.get(id(read), ("", read))
            self.shape.gathered[maker or path] = bool(maker)

    def after_linear(self, path: str, module: nn.Module, args: Any, result: Tensor) -> None:
        if not self.is_followed:
            return
        if self.shape.roles[path] == "columns":
            self.split[id(result)] = result
        else:
            # `on_op` has marked it as split; the sum over ranks is whole.
            self.split.pop(id(result), None)
            self.made_by[id(result)] = path, result

    def after_module(self, path: str, module: nn.Module, args: Any, result: Any) -> None:
        if self.is_followed and isinstance(result, Tensor) and path:
            self.made_by[id(result)] = path, result
