"""``--dynamic`` and ``--sharding``: what they say, and what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.graph_capture.distributed.sharding import NO_SHARDING, Sharding
from remat.graph_capture.errors import CaptureError, DeviceError, FileError
from remat.job.request import SHARDING_KEYS, parse_dynamic, parse_sharding


def test_what_the_options_say() -> None:
    texts = ["tokens:1=seq:16:512", "tokens:0=batch", "1:1=seq:16:512", "target:0=side:64:256:32"]
    assert parse_dynamic(texts) == {
        "tokens": {1: ("seq", 16, 512), 0: ("batch",)},
        1: {1: ("seq", 16, 512)},
        "target": {0: ("side", 64, 256, 32)},
    }


@given(
    st.from_regex(r"[a-z_][a-z0-9_]{0,9}", fullmatch=True),
    st.integers(0, 9),
    st.integers(2, 99),
    st.integers(1, 999),
)
def test_any_range_is_read_as_it_is_written(name: str, dim: int, low: int, more: int) -> None:
    entry = (name, low, low + more)
    assert parse_dynamic([f"x:{dim}={name}:{low}:{low + more}"]) == {"x": {dim: entry}}


REFUSED = {
    "tokens": "cannot be read: give ARG:DIM=NAME:LEAST:MOST, such as tokens:1=seq:16:512",
    "tokens:one=seq:2:4": "cannot be read: give",
    "tokens:1=seq:2": "cannot be read: give",
    "tokens:1=seq:2:4:2:2": "cannot be read: give",
    "tokens:1=2seq:2:4": "cannot be read: give",
    "tokens:1=seq:two:4": "its sizes must be whole numbers",
    "tokens:1=seq:-2:4": "its sizes must be whole numbers",
    "tokens:1=seq:2.5:4": "its sizes must be whole numbers",
    "tokens:1=seq:1:4": "begin the range at 2",
    "tokens:1=seq:0:4": "begin the range at 2",
    "tokens:1=seq:8:4": "which is not a range of sizes",
    "tokens:1=seq:4:4": "which is not a range of sizes",
    "tokens:1=seq:16:100:16": "make both ends multiples of 16",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_range_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(CaptureError) as caught:
        parse_dynamic([text])
    assert REFUSED[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_place_and_a_name_have_one_range() -> None:
    with pytest.raises(CaptureError, match="names dimension 1 of x twice"):
        parse_dynamic(["x:1=a:2:4", "x:1=b:2:4"])
    with pytest.raises(
        CaptureError, match=r"give one range to a name: .*a from 2 to 4 and a from 2 to 8"
    ):
        parse_dynamic(["x:1=a:2:4", "y:1=a:2:8"])


HYBRID = Sharding("fsdp2", 8, "layers.*", 2, False, param_dtype="bfloat16", cpu_offload=True)
TEXTS = {
    "": NO_SHARDING,
    "kind=ddp, world=8,bucket_views=yes": Sharding("ddp", 8, bucket_views=True),
    "kind=fsdp2,world=8,reshard_after_forward=4": Sharding("fsdp2", 8, reshard_after_forward=4),
    "kind=fsdp2,world=8,blocks=layers.*,replicas=2,reshard_after_forward=no,param_dtype=bfloat16,"
    "cpu_offload=true": HYBRID,
}


@pytest.mark.parametrize("text", TEXTS)
def test_pairs_of_a_key_and_a_value_are_a_sharding(text: str) -> None:
    assert parse_sharding(text) == TEXTS[text]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "ranks.toml",
            'kind = "fsdp2"\nworld = 8\nblocks = "layers.*"\nreplicas = 2\n'
            'reshard_after_forward = false\nparam_dtype = "bfloat16"\ncpu_offload = true\n',
        ),
        (
            "ranks.json",
            '{"kind": "fsdp2", "world": 8, "blocks": "layers.*", "replicas": 2, '
            '"reshard_after_forward": false, "param_dtype": "bfloat16", "cpu_offload": true}',
        ),
    ],
)
def test_a_file_has_the_same_keys(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert parse_sharding(str(tmp_path / name)) == HYBRID


NO_SHARDINGS = {
    "fsdp2": "is not one value a key; give kind=ddp|zero1|replicate|fsdp2,world=8, or a JSON",
    "kind=ddp,kind=fsdp2": "is not one value a key",
    "world=8": "choose a kind of sharding for 8 ranks: ddp, zero1, replicate or fsdp2",
    "kind=fsdp3,world=8": "Invalid enum value 'fsdp3' - at `kind`; give kind=ddp|zero1|",
    "kind=ddp,ranks=8": "there is no key 'ranks'",
    "kind=ddp,world=all": "Expected `int`, got `str` - at `world`",
    "kind=ddp,world=8,bucket_views=perhaps": "Expected `bool`, got `str` - at `bucket_views`",
}


@pytest.mark.parametrize("text", NO_SHARDINGS)
def test_what_is_no_sharding_is_refused_in_one_line_with_all_keys(text: str) -> None:
    with pytest.raises(DeviceError) as caught:
        parse_sharding(text)
    assert NO_SHARDINGS[text] in str(caught.value)
    assert text == "world=8" or ", ".join(SHARDING_KEYS) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"gone\.toml"):
        parse_sharding(str(tmp_path / "gone.toml"))
    for name, text in (("a.toml", "kind = "), ("a.json", "[]"), ("b.toml", "kind = 1")):
        (tmp_path / name).write_text(text)
        with pytest.raises(DeviceError) as caught:
            parse_sharding(str(tmp_path / name))
        assert ", ".join(SHARDING_KEYS) in str(caught.value)
        assert "\n" not in str(caught.value)
