"""Small models of the kinds that people reported trouble with in 2025 and 2026.

Each function makes a model and one batch; its docstring names the report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, TOKENS, VOCABULARY = 16, 24, 64

Case = tuple[nn.Module, tuple[Any, ...]]


class Computing(nn.Module):
    """Some layers by name, and what a function makes of them and the batch."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.computed = forward
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                self.add_module(name, part)

    def forward(self, *args: Any) -> Tensor:
        return self.computed(self, *args)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, TOKENS, WIDTH)))


def linear(width: int = WIDTH, out: int | None = None) -> nn.Linear:
    return nn.Linear(width, width if out is None else out)


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), linear(out=64), nn.GELU(), linear(64, WIDTH))


def blocks(number: int) -> nn.ModuleList:
    return nn.ModuleList(block() for _ in range(number))


def delta_rule(length: int = 8) -> Case:
    """ml-explore/mlx-lm#1870: a gated delta rule, as a loop over tokens."""

    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        gate, rate = self.gates(x).sigmoid().unbind(-1)
        state, out = x.new_zeros(WIDTH, WIDTH), list[Tensor]()
        for t in range(x.shape[0]):
            state = gate[t] * state
            state = state + rate[t] * torch.outer(k[t], v[t] - k[t] @ state)
            out.append(q[t] @ state)
        return self.out(torch.stack(out)).square().mean()

    parts = {"qkv": linear(out=3 * WIDTH), "gates": linear(out=2), "out": linear()}
    return Computing(forward, **parts), (tokens(length, WIDTH),)


def carried_state() -> Case:
    """A sequence in chunks; each starts from the state that the one before left."""

    def forward(self: Any, x: Tensor) -> Tensor:
        state, total = x.new_zeros(x.shape[0], WIDTH, WIDTH), x.new_zeros(())
        for chunk in x.split(6, 1):
            q, k, v = self.qkv(self.block(chunk)).chunk(3, -1)
            out = q @ state + (q @ k.mT).tril() @ v
            state = state + k.mT @ v
            total = total + self.drop(out).square().mean()
        return total

    parts = {"qkv": linear(out=3 * WIDTH), "block": block(), "drop": nn.Dropout(0.1)}
    return Computing(forward, **parts), (tokens(),)


def looped(*, cut: bool) -> Case:
    """openai/parameter-golf#319, qlabs-eng/slowrun#92: blocks share weights over loops; with `cut`,
    backward goes through the last loop alone."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for i in range(3):
            if cut and i == 2:
                x = x.detach()
            x = x + self.loop.weight[i]
            for layer in self.blocks:
                x = x + layer(x)
        return x.square().mean()

    return Computing(forward, blocks=blocks(2), loop=nn.Embedding(3, WIDTH)), (tokens(),)


def attention_over_depth() -> Case:
    """pytorch/torchtitan#4656: each layer attends over a stack of all earlier results."""

    def forward(self: Any, x: Tensor) -> Tensor:
        seen = [x]
        for layer, query in zip(self.blocks, self.queries, strict=True):
            stack = torch.stack(seen, 0)
            scores = query(stack.float()).softmax(0)
            seen.append(layer((scores * stack.float()).sum(0).to(x.dtype)))
        return seen[-1].square().mean()

    queries = nn.ModuleList(linear(out=1) for _ in range(3))
    return Computing(forward, blocks=blocks(3), queries=queries), (tokens(),)


def frozen_tower() -> Case:
    """locuslab/open-unlearning#178: a frozen tower, whose input a hook makes require grad, as
    `enable_input_require_grads` does, and adapters within."""

    def forward(self: Any, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer, down, up in zip(self.blocks, self.down, self.up, strict=True):
            x = x + layer(x) + up(down(x))
        return self.head(x).square().mean()

    model = Computing(
        forward, embedding=nn.Embedding(VOCABULARY, WIDTH), blocks=blocks(3), head=linear(),
        down=nn.ModuleList(linear(out=2) for _ in range(3)),
        up=nn.ModuleList(linear(2, WIDTH) for _ in range(3)),
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("down", "up")))
    model.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_(True))
    return model, (torch.randint(VOCABULARY, (2, TOKENS)),)


class FusedLoss(torch.autograd.Function):
    """A head with its cross-entropy, in chunks; all gradients are made in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        loss, of_x, of_weight = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(weight)
        for part, wanted, gradient in zip(x.split(8), target.split(8), of_x.split(8), strict=True):
            logits = part @ weight.T
            chances = logits.softmax(-1)
            loss += functional.cross_entropy(logits, wanted, reduction="sum")
            chances[torch.arange(wanted.shape[0]), wanted] -= 1
            gradient.copy_(chances @ weight)
            of_weight.addmm_(chances.T, part)
        ctx.save_for_backward(of_x, of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        of_x, of_weight = ctx.saved_tensors
        return gradients[0] * of_x, gradients[0] * of_weight, None


def frozen_head() -> Case:
    """fla-org/flash-linear-attention#1253: the gradient of a frozen head is made and kept."""

    def forward(self: Any, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.block(x).flatten(0, 1)
        return FusedLoss.apply(hidden, self.head.weight, target)

    head = linear(out=VOCABULARY).requires_grad_(False)
    target = torch.randint(VOCABULARY, (2 * TOKENS,))
    return Computing(forward, block=block(), head=head), (tokens(), target)


def cache_in_a_dictionary() -> Case:
    """NVlabs/LongLive#16: forward writes keys and values into a cache, and attends over it."""

    def forward(self: Any, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        total = x.new_zeros(())
        for i, chunk in enumerate(x.split(8, 1)):
            q, k, v = self.qkv(chunk).chunk(3, -1)
            place = slice(8 * i, 8 * (i + 1))
            cache["k"][:, place], cache["v"][:, place] = k, v
            # Clones, as autograd refuses later writes to what it has saved.
            keys, values = (cache[name][:, : place.stop].clone() for name in ("k", "v"))
            out = (q @ keys.mT).softmax(-1) @ values
            total = total + self.out(out).square().mean()
        return total

    cache = {"k": torch.zeros(2, TOKENS, WIDTH), "v": torch.zeros(2, TOKENS, WIDTH)}
    return Computing(forward, qkv=linear(out=3 * WIDTH), out=linear()), (tokens(), cache)


def dequantised() -> Case:
    """bitsandbytes-foundation/bitsandbytes#1935: frozen weights of 8 bits, adapters beside them."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for i, (down, up) in enumerate(zip(self.down, self.up, strict=True)):
            weight = self.codes[i].float() * self.scales[i]
            x = x + functional.gelu(functional.linear(x, weight)) + up(down(x))
        return x.square().mean()

    width, layers = 128, 6
    model = Computing(
        forward, scales=torch.rand(layers, width, 1) / 500,
        codes=torch.randint(-127, 127, (layers, width, width), dtype=torch.int8),
        down=nn.ModuleList(linear(width, 2) for _ in range(layers)),
        up=nn.ModuleList(linear(2, width) for _ in range(layers)),
    )  # fmt: skip
    return model, (tokens(4, 8, width),)


def tied_routes(dtype: torch.dtype = torch.bfloat16) -> Case:
    """pytorch/torchtitan#3146, NVIDIA-NeMo/Automodel#3156: a router with exact ties, in bfloat16,
    over tokens that come twice."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for gate, experts in zip(self.gates, self.experts, strict=True):
            flat = self.norm(x).flatten(0, 1)
            weights, chosen = gate(flat).softmax(-1).topk(2)
            shares = torch.zeros(flat.shape[0], 4, dtype=x.dtype).scatter(1, chosen, weights)
            parts = [expert(flat) * shares[:, i : i + 1] for i, expert in enumerate(experts)]
            x = x + torch.stack(parts).sum(0).view_as(x)
        return x.float().square().mean()

    gates = nn.ModuleList(linear(out=4) for _ in range(2))
    nn.init.zeros_(gates[0].weight)
    model = Computing(
        forward, gates=gates, norm=nn.LayerNorm(WIDTH),
        experts=nn.ModuleList(nn.ModuleList(block() for _ in range(4)) for _ in range(2)),
    ).to(dtype)  # fmt: skip
    return model, (tokens(1, TOKENS, WIDTH).repeat(2, 1, 1).to(dtype),)


def log_probabilities_in_chunks() -> Case:
    """NVIDIA-NeMo/labs-molt#121: logarithms of probabilities by chunks of tokens, whose float32
    logits autograd keeps all the same."""

    def forward(self: Any, x: Tensor, target: Tensor) -> Tensor:
        hidden, found = self.block(x).flatten(0, 1), list[Tensor]()
        for part, wanted in zip(hidden.split(8), target.split(8), strict=True):
            logits = self.head(part).float()
            chosen = logits.gather(-1, wanted[:, None])[:, 0]
            found.append(chosen - logits.logsumexp(-1))
        return -torch.cat(found).mean()

    target = torch.randint(2048, (2 * TOKENS,))
    return Computing(forward, block=block(), head=linear(out=2048)), (tokens(), target)


def groups_of_answers() -> Case:
    """huggingface/trl#2709: GRPO over eight answers, row by row, beside a reference without
    gradients."""

    def of_rows(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        rows = zip(model(x), target, strict=True)
        return torch.stack([
            row.log_softmax(-1).gather(-1, wanted[:, None])[:, 0] for row, wanted in rows
        ])  # fmt: skip

    def forward(self: Any, x: Tensor, target: Tensor, advantage: Tensor) -> Tensor:
        new = of_rows(self.policy, x, target)
        with torch.no_grad():
            reference = of_rows(self.reference, x, target)
        ratio = (new - new.detach()).exp()
        apart = (reference - new).exp() - (reference - new) - 1
        return -(ratio * advantage[:, None] - 0.04 * apart).mean()

    def made() -> nn.Module:
        return nn.Sequential(block(), linear(out=512))

    model = Computing(forward, policy=made(), reference=made().requires_grad_(False))
    batch = tokens(8, TOKENS, WIDTH), torch.randint(512, (8, TOKENS)), torch.randn(8)
    return model, batch


def reference_with_gradients(*, forgotten: bool = True) -> Case:
    """huggingface/trl#5900: a frozen reference that runs with gradients on, or, unless
    `forgotten`, under `no_grad`."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.set_grad_enabled(forgotten):
            reference = self.reference(x)
        return (self.policy(x) - reference.detach()).square().mean()

    reference = nn.Sequential(*blocks(3)).requires_grad_(False)
    policy = nn.Sequential(*blocks(3))
    return Computing(forward, first=linear(), policy=policy, reference=reference), (tokens(),)


def sparse_attention() -> Case:
    """hao-ai-lab/FastVideo#1423, InternLM/xtuner#1989: an indexer picks blocks of keys, which
    attention gathers."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for indexer, qkv in zip(self.indexer, self.qkv, strict=True):
            q, k, v = qkv(self.norm(x)).chunk(3, -1)
            blocks_of = [one.unflatten(1, (-1, 4)) for one in (k, v)]
            scores = indexer(x) @ blocks_of[0].mean(2).mT
            chosen = scores.topk(2, -1).indices
            rows = torch.arange(x.shape[0])[:, None, None]
            keys, values = (one[rows, chosen].flatten(2, 3) for one in blocks_of)
            chances = (q[:, :, None] @ keys.mT / 4).softmax(-1)
            x = x + (chances @ values)[:, :, 0]
        return x.square().mean()

    model = Computing(
        forward, indexer=nn.ModuleList(linear() for _ in range(2)), norm=nn.LayerNorm(WIDTH),
        qkv=nn.ModuleList(linear(out=3 * WIDTH) for _ in range(2)),
    )  # fmt: skip
    return model, (tokens(),)


def profiled() -> Case:
    """pytorch/pytorch#196862: regions of the profiler within forward."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.blocks):
            with torch.profiler.record_function(f"layer {i}"):
                x = x + self.drop(layer(x))
        return x.square().mean()

    return Computing(forward, blocks=blocks(3), drop=nn.Dropout(0.1)), (tokens(),)


@torch.library.custom_op("reported_models::count_positive", mutates_args={"counts"})
def count_positive(x: Tensor, counts: Tensor) -> None:
    counts += (x > 0).sum()


def telemetry() -> Case:
    """PrimeIntellect-ai/prime-rl#3419: an op of one's own counts in a buffer."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = x + layer(x)
            count_positive(x.detach(), self.counts)
        return x.square().mean()

    counts = torch.zeros((), dtype=torch.int64)
    return Computing(forward, blocks=blocks(3), counts=counts), (tokens(),)


CASES: dict[str, Callable[[], Case]] = {
    "delta rule": delta_rule,
    "carried state": carried_state,
    "looped": lambda: looped(cut=False),
    "looped, cut": lambda: looped(cut=True),
    "attention over depth": attention_over_depth,
    "frozen tower": frozen_tower,
    "frozen head": frozen_head,
    "cache in a dictionary": cache_in_a_dictionary,
    "dequantised": dequantised,
    "tied routes": tied_routes,
    "log probabilities": log_probabilities_in_chunks,
    "groups of answers": groups_of_answers,
    "reference, forgotten": reference_with_gradients,
    "reference, no_grad": lambda: reference_with_gradients(forgotten=False),
    "sparse attention": sparse_attention,
    "profiled": profiled,
    "telemetry": telemetry,
}
