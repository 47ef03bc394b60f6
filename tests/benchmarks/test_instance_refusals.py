"""Instance files and options that mean nothing: each refused in one line, with status 2."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.instance import main
from tests.benchmarks.instances import DIAMOND, run, written

Refusal = Callable[..., str]


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """The one line that such a call ends with, in this process."""

    def of(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["benchmarks.instance", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        assert (stopped.value.code, printed.out) == (2, "")
        assert printed.err.count("\n") == 1
        return printed.err

    return of


def _node(node: int | str) -> dict[str, Any]:
    return {"id": node, "cost": 1, "bytes": 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"edges": [["a", "b"], ["b", "c"], ["c", "b"]]}, "cycle: b -> c -> b"),
        ({"edges": [["a", "a"]]}, "cycle: a -> a"),
        ({"edges": [["a", "z"]]}, "edge ['a', 'z'] names a missing node: 'z'"),
        ({"nodes": [{"id": "a", "cost": 1, "bytes": -1}]}, "node 'a' has negative bytes: -1"),
        ({"nodes": [{"id": "a", "cost": -2, "bytes": 1}]}, "negative or infinite cost: -2"),
        ({"nodes": [{"id": 1, "cost": 1, "bytes": 1}] * 2}, "node id 1 is given twice"),
        ({"nodes": [{"id": 1, "cost": 1}]}, "missing required field `bytes` - at `$.nodes[0]`"),
        ({"nodes": []}, "there are no nodes"),
        ({"order": ["a", "b", "c"]}, "order is no permutation: it lacks node 'd'"),
        ({"order": ["a", "b", "c", "c"]}, "order is no permutation: it has 'c' twice"),
        ({"order": ["a", "b", "c", "d", "e"]}, "order is no permutation: 'e' is no node"),
        ({"order": ["b", "a", "c", "d"]}, "order contradicts edge ['a', 'b']: 'b' comes first"),
        ({"constant_bytes": -1}, "constant_bytes is negative: -1"),
        ({"nodes": {}}, "Expected `array`, got `object` - at `$.nodes`"),
        ({"nodes": [_node(1), _node("a")]}, "numbers or texts, not both: 1 and 'a'"),
        ({"edges": [["a", "b", "c"]]}, "Expected `array` of length 2 - at `$.edges[0]`"),
        ({"edges": [["a", None]]}, "Expected `int | str`, got `null` - at `$.edges[0][1]`"),
        ({"edges": [["a", 1]]}, "edge ['a', 1] names a missing node: 1"),
        ({"order": ["a", "b", "c", None]}, "got `null` - at `$.order[3]`"),
    ],
)
def test_bad_instances_are_refused_in_one_line(
    tmp_path: Path, refusal: Refusal, change: dict[str, Any], said: str
) -> None:
    path = written(tmp_path, {**DIAMOND, **change})
    line = refusal(path, "--budget", 10)
    assert said in line
    assert str(path) in line


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"id": "a"', '"id": null', "Expected `int | str`, got `null` - at `$.nodes[0].id`"),
        ('"id": "a"', '"id": 1.5', "Expected `int | str`, got `float` - at `$.nodes[0].id`"),
        ('"cost": 2', '"cost": NaN', "is not JSON"),
        ('"cost": 2', '"cost": Infinity', "is not JSON"),
        ('"cost": 2', '"cost": 1e999', "Number out of range - at `$.nodes[0].cost`"),
        ('"cost": 2', '"cost": 1e300', "node 'a' costs more than 1e+100"),
        ('"cost": 2', f'"cost": 1{"0" * 400}', "node 'a' costs more than 1e+100"),
        ('"cost": 2', '"cost": "2"', "got `str` - at `$.nodes[0].cost`"),
        ('"cost": 2', '"cost": true', "got `bool` - at `$.nodes[0].cost`"),
        ('"cost": 2', '"cost": null', "got `null` - at `$.nodes[0].cost`"),
        ('"bytes": 1', '"bytes": 1.5', "Expected `int`, got `float` - at `$.nodes[3].bytes`"),
        ('"bytes": 1', f'"bytes": 1{"0" * 30}', "node 'd' has 4611686018427387904 bytes or more"),
        ('"edges"', "edges", "is not JSON"),
        (json.dumps(DIAMOND), "[]", "Expected `object`, got `array`"),
        (json.dumps(DIAMOND), "", "is not JSON: Input data was truncated"),
    ],
)
def test_bad_texts_are_refused_in_one_line(
    tmp_path: Path, refusal: Refusal, before: str, after: str, said: str
) -> None:
    text = json.dumps(DIAMOND)
    assert before in text
    assert said in refusal(written(tmp_path, text.replace(before, after, 1)), "--budget", 10)


def test_bytes_that_are_too_many_in_all_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    path = written(tmp_path, {**DIAMOND, "constant_bytes": 1 << 62})
    line = refusal(path, "--budget", 10, "--constants", "resident")
    assert "add up to 4611686018427387917, more than can be computed with" in line
    assert str(path) in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "0"], "budgets must be positive bytes, found '0'"),
        (["--budget", "-3"], "budgets must be positive bytes, found '-3'"),
        (["--budget", "9.5"], "budgets must be positive bytes, found '9.5'"),
        (["--budget", "nan"], "budgets must be positive bytes, found 'nan'"),
        ([], "the following arguments are required: --budget"),
        (["--budget", "9", "--gap", "-1"], "must be zero or a positive fraction, found '-1'"),
        (["--budget", "9", "--gap", "nan"], "must be zero or a positive fraction, found 'nan'"),
        (["--budget", "9", "--seed", "-1"], "must be a whole number from 0 on, found '-1'"),
        (["--budget", "9", "--seed", f"{1 << 31}"], "seed must be a whole number, 0 or more, at"),
        (["--budget", "9", "--time-limit", "nan"], "must be a positive number of seconds"),
        (["--budget", "9", "--time-limit", "inf"], "must be a positive number of seconds"),
        (["--budget", "9", "--workers", "0"], "must be a whole number from 1 on, found '0'"),
        (["--budget", "9", "--time-limit", "0"], "must be a positive number of seconds"),
        (["--budget", "9", "--order", "any"], "invalid choice: 'any'"),
        (["--budget", "9", "--solver", "cat"], "unknown solver 'cat'"),
        (["--budget", "9", "--solver", "cut", "--order", "free"], "order free"),
        (["--budget", "9", "--out", "/no/such/folder/x"], "no folder /no/such/folder"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    tmp_path: Path, refusal: Refusal, options: list[str], said: str
) -> None:
    assert said in refusal(written(tmp_path, DIAMOND), *options)


def test_missing_file_and_text_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    assert "No such file" in refusal(tmp_path / "none.json", "--budget", 9)
    done = run(written(tmp_path, "nodes"), "--budget", 9)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not JSON" in done.stderr
