"""Small models that are compiled for a budget; as a program, one start, told as JSON."""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn
from torch.nn import functional

from remat.compile.graph_context import compiled_plans
from tests.limits import AMPLE_S

FEW = {"replays": 4, "solver": "cut", "time_limit_s": AMPLE_S}


class Net(nn.Module):
    """Linear layers, activations and dropout, with the loss inside."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [m for _ in range(3) for m in (nn.Linear(width, width), nn.GELU())]
        self.layers = nn.Sequential(*layers, nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Classifier(nn.Module):
    """Its loss saves logits, which backward may write over."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(16, 512)

    def forward(self, x: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(x), torch.zeros(64, dtype=torch.long))


def twice(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """What the second backward of one forward adds to each gradient, less what the first did."""
    model.zero_grad()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss.backward()
    return [
        p.grad - 2 * g for p, g in zip(model.parameters(), first, strict=True) if p.grad is not None
    ]


def main() -> None:
    """Print how many candidates were replayed, the peak, and the bits of the gradients."""
    model = Net()
    step = torch.compile(model, backend="remat", options={**FEW, "budget": "70%"})
    torch.manual_seed(1)
    step(torch.randn(512, 32)).backward()
    (plan,) = compiled_plans()
    bits = [p.grad.view(torch.int32).sum().item() for p in model.parameters() if p.grad is not None]
    print(json.dumps([plan.replays, plan.peak_bytes, bits]))


if __name__ == "__main__":
    main()
