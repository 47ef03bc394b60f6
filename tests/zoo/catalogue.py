"""All models of the zoo, by the name under which `docs/models.md` lists them."""

from __future__ import annotations

from tests.zoo import (
    adapters,
    diffusion,
    hugging_face,
    nano_gpt,
    seeing_and_hearing,
    traits,
    vision,
    x_transformers_models,
)
from tests.zoo.case import Entry

ZOO: dict[str, Entry] = {
    **hugging_face.ENTRIES,
    **seeing_and_hearing.ENTRIES,
    **diffusion.ENTRIES,
    **x_transformers_models.ENTRIES,
    **adapters.ENTRIES,
    **vision.ENTRIES,
    **nano_gpt.ENTRIES,
    **traits.ENTRIES,
}
