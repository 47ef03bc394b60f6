"""Hugging Face's `Trainer` reads the loss alone: its steps return no more, where that is sure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import remat
from remat.caches.per_shape_plans import planned_modules
from remat.graph_capture.errors import LeftOutError
from remat.graph_capture.tracing.left_out import THE_LOSS, LeftOut
from tests.paths import ROOT
from tests.remat.planned_steps import require_libraries, watched

pytestmark = pytest.mark.filterwarnings("ignore")
MIB = 1 << 20
TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
LARGE_HEAD = {"vocab_size": 16_000, "hidden_size": 64, "intermediate_size": 128}


def llama(**sizes: int) -> Any:
    require_libraries("transformers", "accelerate")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**heads, max_position_embeddings=256, **sizes))


def trainer_of(
    model: nn.Module, folder: Path, length: int = 8, kind: Any = None, given: Any = (), **more: Any
) -> Any:
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(1)
    words = next(model.parameters()).shape[0]
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(words, (6, length))]
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=1, per_device_train_batch_size=2,
        logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", **more,
    )  # fmt: skip
    return (kind or Trainer)(
        model=model, args=arguments, train_dataset=data, eval_dataset=data[:2], **dict(given)
    )


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


def with_own_loss() -> Any:
    from transformers import Trainer

    class Reading(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            loss, result = super().compute_loss(model, inputs, return_outputs=True)
            loss = loss + 1e-3 * result.logits.square().mean()
            return (loss, result) if return_outputs else loss

    return Reading


def read_by_a_function(result: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return cross_entropy(result.logits.flatten(0, 1), labels.flatten())


READERS: dict[str, Callable[[], dict[str, Any]]] = {
    "a trainer of the user's": lambda: {"kind": with_own_loss()},
    "a loss function": lambda: {"given": {"compute_loss_func": read_by_a_function}},
    "label smoothing": lambda: {"label_smoothing_factor": 0.1},
}


def outputs_of(cache: Any) -> list[Any]:
    return [type(one)._remat_outputs for one in planned_modules(cache)]


@pytest.mark.parametrize("reader", [None, *READERS])
@pytest.mark.parametrize("bf16", [False, True])
def test_training_gives_eagers_losses_and_weights(
    reader: str | None, bf16: bool, tmp_path: Path
) -> None:
    eager, model = llama(**TINY), llama(**TINY)
    fast = remat.rematerialize(model, budget="100%")
    given = READERS[reader]() if reader else {}
    losses, expected = (
        losses_of(trainer_of(one, tmp_path, bf16=bf16, **given)) for one in (fast, eager)
    )
    assert len(losses) == 4
    assert losses == expected
    assert all(map(torch.equal, fast.state_dict().values(), eager.state_dict().values()))
    assert set(outputs_of(fast)) == {None if reader else THE_LOSS}


def test_predictions_and_other_callers_get_logits(tmp_path: Path) -> None:
    fast = remat.rematerialize(llama(**TINY), budget="100%")
    trainer, batches = trainer_of(fast, tmp_path), list[Any]()
    note = fast.register_forward_pre_hook(lambda *of: batches.append(of[2]), with_kwargs=True)
    trainer.train()
    note.remove()
    assert trainer.predict(trainer.eval_dataset).predictions.shape == (2, 8, 32)
    assert isinstance(fast.train()(**batches[0]).logits, Tensor)
    assert outputs_of(fast) == [THE_LOSS, None]


class Around(nn.Module):
    """Reads logits between the trainer and the planned module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        result = self.inner(input_ids=input_ids, labels=labels)
        return {"loss": result.loss + result.logits.square().mean()}


def test_what_lies_between_may_read_all(tmp_path: Path) -> None:
    fast = remat.rematerialize(llama(**TINY), budget="100%")
    trainer_of(Around(fast), tmp_path).train()
    hooked = remat.rematerialize(llama(**TINY), budget="100%")
    seen: list[Any] = []
    hooked.register_forward_hook(lambda *given: seen.append(given[-1].logits.shape))
    trainer_of(hooked, tmp_path).train()
    assert outputs_of(fast) == outputs_of(hooked) == [None]
    assert len(seen) == 3


def test_outputs_that_are_named_count(tmp_path: Path) -> None:
    fast = remat.rematerialize(llama(**TINY), budget="100%", outputs=("loss", "logits"))
    trainer_of(fast, tmp_path).train()
    assert outputs_of(fast) == [("loss", "logits")]


def test_a_reader_that_is_not_seen_is_told_what_to_pass() -> None:
    with pytest.raises(LeftOutError, match=r"^pass outputs=\('loss', 'logits'\) to remat\.rem"):
        LeftOut("logits", THE_LOSS).sum()


@pytest.mark.slow
def test_a_large_head_runs_in_chunks_by_the_one_line(tmp_path: Path) -> None:
    eager, model = (llama(**LARGE_HEAD, num_hidden_layers=2) for _ in range(2))
    fast = remat.rematerialize(model, budget="min")
    with watched() as steps:
        losses = losses_of(trainer_of(fast, tmp_path, 256))
    assert losses == losses_of(trainer_of(eager, tmp_path, 256))
    assert all(map(torch.equal, fast.state_dict().values(), eager.state_dict().values()))
    (plan,) = remat.plans(fast)
    assert plan.peak_bytes <= 20 * MIB
    assert len(steps.planned) == 3
    ids = torch.zeros(2, 256, dtype=torch.int64)
    step = remat.capture(eager.train(), (), {"input_ids": ids, "labels": ids})
    whole = remat.solve(step, "min", time_limit_s=5).peak_bytes
    text = f"{plan.peak_bytes / MIB:.1f} MiB in place of {whole / MIB:.1f} MiB"
    assert text in (ROOT / "docs" / "how-to" / "large_vocabulary.md").read_text()
    assert all(0 < step.peak_bytes <= plan.peak_bytes for step in steps.planned)
