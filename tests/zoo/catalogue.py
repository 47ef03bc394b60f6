"""All models of the zoo, by the name under which `docs/models.md` lists them."""

from __future__ import annotations

from tests.zoo import hugging_face, traits, vision
from tests.zoo.case import Entry

ZOO: dict[str, Entry] = {**hugging_face.ENTRIES, **vision.ENTRIES, **traits.ENTRIES}
