"""Adapters of PEFT on small models of Hugging Face transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.zoo.case import Case, Entry
from tests.zoo.hugging_face import decoder, t5

QUERIES = {"target_modules": ["q_proj", "v_proj"]}
FED = {
    "target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"],
}  # fmt: skip
llama = functools.partial(decoder, "Llama")


def adapted(
    base: Callable[[], Case], kind: str, options: dict[str, Any], task: str = "CAUSAL_LM"
) -> Case:
    """A model with an adapter; all else is frozen."""
    import peft

    case = base()
    config = getattr(peft, f"{kind}Config")(task_type=task, **options)
    model: Any = case.model
    return case.of(peft.get_peft_model(model, config).train())


TABLE: dict[str, tuple[Any, ...]] = {
    "LoRA on Llama": (llama, "Lora", {"r": 4, "lora_dropout": 0.1, **QUERIES}),
    "LoRA on T5": (t5, "Lora", {"r": 4, "target_modules": ["q", "v"]}, "SEQ_2_SEQ_LM"),
    "DoRA": (llama, "Lora", {"r": 4, "use_dora": True, **QUERIES}),
    "IA3": (llama, "IA3", FED),
    "prompt tuning": (llama, "PromptTuning", {"num_virtual_tokens": 4}),
    "LoHa": (llama, "LoHa", {"r": 4, **QUERIES}),
}
REFUSED = {"LoHa": "Control flow or a shape depends on tensor data"}

ENTRIES = {
    f"PEFT {name}": Entry(functools.partial(adapted, *row), "peft", refused=REFUSED.get(name, ""))
    for name, row in TABLE.items()
}
