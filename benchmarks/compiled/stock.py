"""What a budget of 100 % is worth: `python -m benchmarks.compiled.stock`.

Five models, each compiled by torch alone and by ``backend="remat"`` at a budget, 100 % unless
`--budget` says else. Printed are the peaks of the step as torch compiles it and as it is planned,
each predicted | measured, planned over torch's as measured, and the largest difference of the
gradients from torch's. Peaks count what a step allocates, without parameters and batch. Ends with
status 1 if a planned step takes over 1 % more than torch's, or than predicted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.nn import functional

from examples import gpt, llama, resnet, unet
from remat.compile.graph_context import compiled_plans
from remat.graph_capture.devices.memory_events import measure_peak

TOLERANCE = 1.01
VOCAB = 16_384  # the logits are then the largest value of the step


class WithLoss(nn.Module):
    """A model with its loss inside, so that the budget covers both."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss_fn(self.model(x), target)


def _gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    sizes = gpt.Sizes(layers=2, width=128, heads=4, seq=128, batch=8, vocab=VOCAB, dropout=0.0)
    ids = torch.randint(sizes.vocab, (sizes.batch, sizes.seq + 1))
    return gpt.GPT(sizes), (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def _mlp() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layers = [m for _ in range(6) for m in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    batch = torch.randn(2048, 256), torch.randint(10, (2048,))
    return WithLoss(model, functional.cross_entropy), batch


def _resnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = resnet.ResNet18(16)
    batch = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    return WithLoss(model, functional.cross_entropy), batch


def _unet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    batch = torch.randn(4, 3, 64, 64), torch.randint(unet.CLASSES, (4, 64, 64))
    return WithLoss(unet.UNet(8), functional.cross_entropy), batch


def _llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    sizes = llama.Sizes(
        layers=2, width=128, heads=4, kv_heads=2, hidden=384, seq=128, batch=8, vocab=4096
    )
    ids = torch.randint(sizes.vocab, (sizes.batch, sizes.seq))
    return WithLoss(llama.Llama(sizes), llama.next_token_loss), (ids, ids)


MODELS = {"gpt": _gpt, "mlp": _mlp, "resnet": _resnet, "unet": _unet, "llama": _llama}


class Ran(NamedTuple):
    """A step's peak and gradients."""

    peak_bytes: int
    gradients: list[Tensor]


def _run(name: str, **asked: Any) -> Ran:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    compiled = torch.compile(model, **asked)

    def step() -> None:
        compiled(*batch).backward()

    step()  # compiles
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    peak_bytes = measure_peak(step)
    return Ran(peak_bytes, gradients)


class Row(NamedTuple):
    """One model at a budget; bytes of a step, without parameters and batch."""

    name: str
    predicted_stock_bytes: int
    stock_bytes: int
    predicted_bytes: int
    planned_bytes: int
    difference: float  # of the gradients, relative

    @property
    def is_good(self) -> bool:
        """Whether the step takes no more than torch's, nor than predicted."""
        return self.planned_bytes <= TOLERANCE * min(self.stock_bytes, self.predicted_bytes)

    def __str__(self) -> str:
        pairs = (self.predicted_stock_bytes, self.stock_bytes), (
            self.predicted_bytes, self.planned_bytes
        )  # fmt: skip
        shown = "".join(f"{a / 2**20:11.2f} | {b / 2**20:7.2f}" for a, b in pairs)
        over = self.planned_bytes / self.stock_bytes
        return f"{self.name:8}{shown}{over:10.3f}{self.difference:12.1e}"


def measured(name: str, budget: str = "100%") -> Row:
    """Both steps of a model, neither from a cache."""
    with (
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
    ):
        stock = _run(name)
        planned = _run(name, backend="remat", options={"budget": budget, "verbose": False})
    plan = compiled_plans()[-1]
    held_bytes = plan.held_bytes
    pairs = zip(planned.gradients, stock.gradients, strict=True)
    return Row(
        name, plan.baseline_peak_bytes - held_bytes, stock.peak_bytes,
        plan.peak_bytes - held_bytes, planned.peak_bytes,
        max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.compiled.stock", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--budget", default="100%")
    asked = parser.parse_args(arguments)
    print("MiB       as torch compiles it             planned   planned/torch  difference")
    rows = []
    for name in asked.models:
        rows.append(measured(name, asked.budget))
        print(rows[-1], flush=True)
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
