"""A small model that is compiled for a budget; as a program, one start, told as JSON."""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

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
