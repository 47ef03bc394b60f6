"""Attention over tokens that ranks share in a ring: torch's own, as one op of a graph.

Keys and values go round while each rank computes with those that it has (Ring Attention, Liu et al.
2023, https://arxiv.org/abs/2310.01889). Partial results are merged, so sums are rounded otherwise
than on one rank. What a rank computes in each round depends on its place; as one op it is the same
in the graphs of all ranks, which follow one schedule.

Causal attention is as much work on each rank if the i-th of n has the i-th and the i-th last of 2n
parts of a sequence (Brandon et al., Striped Attention, 2023, https://arxiv.org/abs/2311.09431,
balance likewise); torch's implementation takes tokens in that order.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import (
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from remat.graph_capture.distributed.collectives import resolved_group
from remat.graph_capture.joint.nodes import aten
from remat.graph_capture.torch_private.core import torchs_ring

HEADS, TOKENS = 1, 2  # dimensions of a query, key or value
_FORM = torch.contiguous_format


@torch.library.custom_op("remat_ring::attention", mutates_args=())
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, ranks: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Own tokens' attention to those of all `ranks`, and its log-sum-exp in float32.

    Tensors are [batch, heads, tokens, width]; `key` may have fewer heads than `query`. With
    `is_causal` own tokens are two parts of the sequence, of which the later one comes second.
    """
    with torchs_ring(is_causal) as ring:
        found = ring._templated_ring_attention(
            resolved_group(group_name), TOKENS, _one_round, query, key, value, is_causal,
            scale=scale,
        )  # fmt: skip
    return found[0].contiguous(), found[1].contiguous()


@ring_attention.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    made = torch.empty_like(query, memory_format=_FORM)
    return made, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("remat_ring::attention_backward", mutates_args=())
def _ring_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, made: Tensor, sums: Tensor,
    is_causal: bool, scale: float | None, ranks: int, group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    with torchs_ring(is_causal) as ring:
        found = ring._templated_ring_attention_backward(
            resolved_group(group_name), TOKENS, _one_round_back, grad, "grad_out", query, key,
            value, made, sums, is_causal, scale=scale,
        )  # fmt: skip
    # Those of keys and values are views of one buffer, which two results of an op must not be.
    return found[0].contiguous(), *(t.clone(memory_format=_FORM) for t in found[1:3])


@_ring_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t, memory_format=_FORM) for t in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *ctx.how = inputs
    ctx.save_for_backward(query, key, value, *output)


def _of_loss(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    return (*_ring_backward(grad, *ctx.saved_tensors, *ctx.how), None, None, None, None)


ring_attention.register_autograd(_of_loss, setup_context=_keep)


# What a rank computes in one round.


def _one_round(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    key, value = (_for_all_heads(t, query) for t in (key, value))
    if query.is_cuda:
        found = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
        return found[0], found[1]
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, scale=scale
    )


def _one_round_back(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor, *,
    is_causal: bool, scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    keys = key.shape[HEADS]
    key, value = (_for_all_heads(t, query) for t in (key, value))
    given = grad_out, query, key, value, out, logsumexp
    if query.is_cuda:
        drawn = torch.zeros(2, dtype=torch.uint64, device=query.device)  # read with dropout alone
        lengths = None, None, query.shape[TOKENS], key.shape[TOKENS]
        made = aten._scaled_dot_product_flash_attention_backward(
            *given, *lengths, 0.0, is_causal, drawn, drawn[:1], scale=scale
        )
    else:
        made = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, 0.0, is_causal, scale=scale
        )
    return made[0], *(t.unflatten(HEADS, (keys, -1)).sum(HEADS + 1) for t in made[1:3])


def _for_all_heads(t: Tensor, query: Tensor) -> Tensor:
    """Grouped queries: a head of keys serves several of queries."""
    copies = query.shape[HEADS] // t.shape[HEADS]
    return t.repeat_interleave(copies, HEADS) if copies > 1 else t


# What a run takes, as a model of it: its arithmetic is that of fused attention.


@register_flop_formula(torch.ops.remat_ring.attention)
def _(
    query: Any, key: Any, value: Any, is_causal: bool, scale: Any, ranks: int, *_: Any, **__: Any
) -> int:
    keys = _keys_of_all(query, key, ranks)
    return sdpa_flop_count(query, keys, keys)


@register_flop_formula(torch.ops.remat_ring.attention_backward)
def _(
    grad: Any, query: Any, key: Any, value: Any, made: Any, sums: Any, is_causal: bool, scale: Any,
    ranks: int, *_: Any, **__: Any,
) -> int:  # fmt: skip
    keys = _keys_of_all(query, key, ranks)
    return sdpa_backward_flop_count(grad, query, keys, keys)


def _keys_of_all(query: Any, key: Any, ranks: int) -> tuple[int, ...]:
    return (*query[:TOKENS], ranks * key[TOKENS], key[-1])


class _Traffic(NamedTuple):
    round_bytes: int  # that a rank sends on in each round
    rounds: int
    held_bytes: int  # beside what the op reads and makes


def ring_traffic(node: fx.Node) -> _Traffic:
    """Of a run of one of the two ops."""
    query, key, value = (arg.meta["val"] for arg in _attended(node))
    keys_bytes = key.nbytes + value.nbytes
    ranks = next(arg for arg in reversed(node.args) if isinstance(arg, int))
    for_all_heads = keys_bytes * (query.shape[HEADS] // key.shape[HEADS])
    copies_bytes = for_all_heads if for_all_heads > keys_bytes else 0
    sums_bytes = 4 * prod(query.shape)  # float32
    if not _is_gradient(node):  # the merged result, and what is merged into it
        return _Traffic(keys_bytes, ranks - 1, 2 * keys_bytes + copies_bytes + 3 * sums_bytes)
    gradients_bytes = 4 * (prod(key.shape) + prod(value.shape))
    held_bytes = 2 * keys_bytes + copies_bytes + for_all_heads + 3 * gradients_bytes
    return _Traffic(keys_bytes + gradients_bytes, ranks, held_bytes + sums_bytes + query.nbytes)


def _is_gradient(node: fx.Node) -> bool:
    return node.target is torch.ops.remat_ring.attention_backward.default


def _attended(node: fx.Node) -> tuple[Any, ...]:
    return node.args[1:4] if _is_gradient(node) else node.args[:3]
