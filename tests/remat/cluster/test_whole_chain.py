"""Values for what a rank has of a model on the meta device: same, tied, whole, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from remat.cluster.apply.whole_chain import materialize_modules, state_by_path
from remat.graph_capture.errors import PlanError
from remat.ranks.collective_call import values_digest


class Ends(nn.Module):
    """An embedding whose weight the head shares, and a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(8, 4)
        self.out = nn.Linear(4, 8)
        self.out.weight = self.tok.weight
        self.out.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.tok(ids)) * self.out.scale


def ends(device: str = "cpu") -> Ends:
    torch.manual_seed(3)
    with torch.device(device):
        return Ends()


def digest(modules: dict[str, nn.Module]) -> str:
    return values_digest(state_by_path(modules))


def children(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_children())


def loaded(path: str, module: nn.Module) -> None:
    """What a user writes: storage, the checkpoint's values, and buffers that it lacks."""
    source = ends().get_submodule(path)
    module.to_empty(device="cpu")
    module.load_state_dict(source.state_dict())
    for name, buffer in source.named_buffers():
        module.get_buffer(name).copy_(buffer)


def test_values_are_those_of_the_function_and_ties_hold() -> None:
    made = ends("meta")
    materialize_modules(children(made), loaded)
    assert made.tok.weight is made.out.weight
    ids = torch.arange(8)
    assert torch.equal(made(ids), ends()(ids))
    assert digest(children(made)) == digest(children(ends()))


def test_a_model_with_storage_stays_as_it_is() -> None:
    made = ends()
    before = list(made.parameters())

    def never(path: str, module: nn.Module) -> None:
        raise AssertionError(path)

    materialize_modules(children(made), never)
    assert all(one is other for one, other in zip(before, made.parameters(), strict=True))


def test_digests_tell_values_and_names_apart() -> None:
    other = ends()
    with torch.no_grad():
        other.tok.weight[-1, -1] += 1
    scaled, turned = ends(), ends()
    scaled.out.get_buffer("scale").fill_(2)
    turned.out.register_buffer("scale", torch.full((1,), 1j))
    sparse = ends()
    sparse.register_buffer("pairs", torch.eye(2).to_sparse())
    found = [ends(), other, scaled, turned, sparse, ends("meta"), nn.Sequential(nn.Linear(4, 8))]
    assert len({digest({"": one}) for one in found}) == len(found)


def half(path: str, module: nn.Module) -> None:
    module.to_empty(device="cpu").half()


def other_shape(path: str, module: nn.Module) -> None:
    module.to_empty(device="cpu")
    module.weight = nn.Parameter(torch.ones(2, 2))


def frozen(path: str, module: nn.Module) -> None:
    module.to_empty(device="cpu").requires_grad_(False)


def without_bias(path: str, module: nn.Module) -> None:
    module.to_empty(device="cpu").register_parameter("bias", None)


REFUSED = {
    "nothing": (lambda path, module: None, r"to_empty.*it left (tok|out)\.\w+ without storage"),
    "half": (half, r"tok\.weight only other values .* float16\[8, 4\], and was float32\[8, 4\]"),
    "shape": (other_shape, r"tok\.weight only other values .* float32\[2, 2\]"),
    "frozen": (frozen, r"float32\[8, 4\], frozen, and was float32\[8, 4\]$"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_the_same_module_is_refused(case: str) -> None:
    materialize: Callable[[str, nn.Module], object]
    materialize, text = REFUSED[case]
    with pytest.raises(PlanError, match=text):
        materialize_modules(children(ends("meta")), materialize)


def test_what_is_missing_afterwards_is_refused() -> None:
    modules: dict[str, nn.Module] = {"up": nn.Linear(4, 4, device="meta")}
    with pytest.raises(PlanError, match=r"give up\.bias .* missing, and was float32\[4\]"):
        materialize_modules(modules, without_bias)


def test_without_a_function_nothing_is_left_without_storage() -> None:
    with pytest.raises(PlanError, match="without storage"):
        materialize_modules(children(ends("meta")), None)
