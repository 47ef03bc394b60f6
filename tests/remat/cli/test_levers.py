"""`--split`, `--outputs` and `--optimizer-in-backward`, with what they take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from remat.cli.main import app

MODEL = """
import torch
from torch import nn
from torch.nn import functional


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(400, 16), nn.Linear(16, 400, bias=False)
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, tokens, target):
        logits = self.head(torch.tanh(self.layers(self.embedding(tokens))))
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def factory(length=64):
    tokens = torch.zeros(4, length).long()
    return {"model": LanguageModel(), "args": (tokens, tokens.clone())}


def short():
    return factory(2)


class Both(LanguageModel):
    def forward(self, tokens, target):
        loss = super().forward(tokens, target)
        return loss, self.embedding(tokens)


def both():
    return factory() | {"model": Both()}
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "job.py").write_text(MODEL)
    return f"{tmp_path / 'job.py'}:factory"


def said(*words: str) -> str:
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_kept_graph_or_plan_is_planned_within_the_split_that_is_asked_for(
    job: str, tmp_path: Path
) -> None:
    kept, plan = tmp_path / "graph.json", tmp_path / "plan.json"
    said("show", job, "--as", "graph", "-o", str(kept))
    said("run", job, "--budget", "min", "--split", "exact", "-o", str(plan))

    def chunks(path: Path, *words: str) -> list[object]:
        found = json.loads(said("run", str(path), "--budget", "min", *words, "--json"))
        return found["pieces"]

    for path in (kept, plan):
        assert chunks(path)
        assert chunks(path, "--split", "exact")
        assert chunks(path, "--split", "none") == []
    assert chunks(kept, "--solver", "chen_sqrt") == []
    done = CliRunner().invoke(app, ["show", str(plan), "--explain", "--split", "none"])
    assert done.exit_code
    assert "capture with the split that the plan was made with" in done.stderr


def test_a_run_says_what_is_in_chunks_and_keeps_it(job: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    text = said("run", job, "--budget", "min", "--split", "exact", "-o", str(plan))
    assert "head and its loss in" in text
    assert "with eager's bits" in text
    found = json.loads(said("run", job, "--budget", "min", "--split", "exact", "--json"))
    (chunks,) = found["pieces"]
    assert chunks["exact"]
    assert chunks["pieces_bytes"] < chunks["whole_bytes"]
    assert "remat.linear_cross_entropy_weight" in said("show", job, "--plan", str(plan))
    assert "head and its loss in" in said("show", str(plan), "--explain")
    said("check", job, str(plan))


def test_an_optimizer_in_backward_needs_fewer_bytes(job: str) -> None:
    short = job.replace(":factory", ":short")
    words = ("run", short, "--no-check", "--budget", "min", "--optimizer", "sgd", "--json")
    after = json.loads(said(*words))
    during = json.loads(said(*words, "--optimizer-in-backward"))
    assert during["plan"]["predicted_peak_bytes"] < after["plan"]["predicted_peak_bytes"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("--optimizer-in-backward",),
            "name the optimizer for updates during backward: --optimizer sgd, momentum or adamw",
        ),
        (
            ("--optimizer-in-backward", "--optimizer", "sgd", "--sharding", "kind=ddp,world=2"),
            "on one",
        ),
    ],
)
def test_what_cannot_be_updated_so_is_refused(job: str, words: tuple[str, ...], text: str) -> None:
    done = CliRunner().invoke(app, ["run", job, "--budget", "min", *words])
    assert done.exit_code == 2
    assert text in " ".join(done.output.split())


def test_explain_says_what_each_lever_brings(job: str) -> None:
    words = ("show", job, "--explain", "--budget", "min", "--split", "exact", "--solver", "cut")
    found = json.loads(said(*words, "--each-limit", "2", "--place", "--json"))
    (chunks,) = (one for one in found["levers"] if one["name"] != "recomputation")
    assert chunks["name"].startswith("head and its loss in ")
    assert chunks["off_bytes"] > chunks["peak_bytes"] == found["peak_bytes"]
    assert chunks["solved"]
    assert found["layout"]["arena_bytes"] >= found["layout"]["load_bytes"]
    assert "levers" in found["seconds"]


def test_outputs_are_named_at_a_run_and_kept_in_its_plan(job: str, tmp_path: Path) -> None:
    both, plan = job.replace(":factory", ":both"), str(tmp_path / "plan.json")
    text = said("run", both, "--budget", "100%", "--outputs", "0", "-o", plan)
    assert "left out      1, which training does not use" in text
    said("check", both, plan)
    said("show", both, "--plan", plan)
    said("show", both, "--plan", plan, "--as", "code")
    done = CliRunner().invoke(app, ["run", plan, "--budget", "100%", "--outputs", "0"])
    assert "leave out --outputs, or name a model: a kept step has its own" in done.output
    done = CliRunner().invoke(app, ["run", both, "--budget", "100%", "--outputs", "loss"])
    assert "name some of 0, 1 in outputs: forward returns no 'loss'" in done.output
