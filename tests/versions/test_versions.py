"""The releases that the tests run on: kept environments, what is recorded, the table of it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from remat.graph_capture.torch_private.core import NEWEST, refused_release
from tests.paths import ROOT
from tests.versions import table
from tests.versions.__main__ import CORE, CORE_PARTS, RECIPES, ZOO, main, of_turn, runs_on
from tests.versions.environment import DONE, EXTRAS, SITE, kept
from tests.versions.record import RESULTS, Counts, counts, record, recorded
from tests.versions.releases import releases
from tests.zoo.catalogue import OF_EACH_FAMILY
from tests.zoo.catalogue import ZOO as ZOO_OF_ALL

JUNIT = """<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10">
</testsuite></testsuites>"""


def test_the_table_is_what_the_command_makes_of_the_results() -> None:
    document = table.DOCS.read_text()
    assert table.with_table(document) == document


def test_a_row_is_there_for_each_release_that_the_package_takes() -> None:
    assert set(recorded()) <= set(releases())
    assert [refused_release(version) for version in releases()] == [""] * len(releases())


class Installed:
    """Stands for pip; it may be cut off."""

    def __init__(self) -> None:
        self.times, self.is_cut_off = 0, False

    def __call__(self, folder: Path) -> None:
        self.times += 1
        (folder / SITE / "torch").mkdir(parents=True)
        if self.is_cut_off:
            raise KeyboardInterrupt


def test_an_environment_is_made_once_and_anew_for_other_manifests(tmp_path: Path) -> None:
    install = Installed()
    for mark in ("a", "a", "b"):
        assert kept(tmp_path / "one", mark, install) == tmp_path / "one"
    assert install.times == 2
    assert (tmp_path / "one" / DONE).read_text() == "b"


def test_an_install_that_was_cut_off_is_made_anew(tmp_path: Path) -> None:
    install = Installed()
    install.is_cut_off = True
    with pytest.raises(KeyboardInterrupt):
        kept(tmp_path / "one", "", install)
    install.is_cut_off = False
    assert (kept(tmp_path / "one", "", install) / DONE).exists()
    assert install.times == 2


def test_an_environment_of_another_python_is_made_anew(tmp_path: Path) -> None:
    folder, install = tmp_path / "one", Installed()
    (folder / "lib" / "python3.9").mkdir(parents=True)
    (folder / DONE).touch()
    kept(folder, "", install)
    assert install.times == 1


def test_counts_of_pytest_are_kept_beside_those_of_other_suites(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    found = counts(tmp_path / "junit.xml")
    assert (found.passed, found.skipped, found.failed) == (4, 3, 3)
    rows, other = tmp_path / "rows.json", Counts(date="2026-01-01", passed=1, skipped=0, failed=0)
    record("2.11.0", "2.11.0+cpu", "3.11.7", "slow", other, rows)
    record("2.11.0", "2.11.0+cpu", "3.11.7", "quick", found, rows)
    assert recorded(rows)["2.11.0"].suites == {"slow": other, "quick": found}
    record("2.11.0", "2.11.0+cpu", "3.12.1", "quick", found, rows)
    assert recorded(rows)["2.11.0"].suites == {"quick": found}


def test_the_results_are_in_the_checkout() -> None:
    assert RESULTS.is_relative_to(ROOT)
    assert RESULTS.exists()


def test_a_failing_release_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, tuple[str, ...]]] = []

    def run(python: Path, *of_pytest: str) -> int:
        ran.append((str(python), of_pytest))
        return 1 if "2.11" in str(python) else 0

    monkeypatch.setattr("tests.versions.__main__.python_with", Path)
    monkeypatch.setattr("tests.versions.__main__.run", run)
    assert main([]) == 1
    assert list(dict.fromkeys(version for version, _ in ran)) == list(releases())
    assert main(["--torch", "2.14.1", "--", "-x"]) == 0
    assert ran[-1] == ("2.14.1", ("-x",))
    ran.clear()
    assert main(["--turn", "3"]) == 1
    assert ran == [("2.11.0", (*CORE, "--part", f"1/{CORE_PARTS}"))]


def test_turns_come_to_each_part_on_each_release() -> None:
    turns = [of_turn(number) for number in range(CORE_PARTS * len(releases()))]
    parts = [f"{number}/{CORE_PARTS}" for number in range(CORE_PARTS)]
    assert sorted(turns) == sorted(([version], part) for version in releases() for part in parts)


def test_recipes_run_on_the_pinned_and_the_newest_release_and_models_on_the_newest() -> None:
    of = {which: runs_on(version) for version, which in releases().items()}
    words = {which: [word for way in ways for word in way] for which, ways in of.items()}
    assert [which for which in of if RECIPES in words[which]] == ["pinned", "newest"]
    assert [which for which in of if set(CORE) <= set(words[which])] == ["oldest", "newest"]
    shown = [word for word in words["newest"] if word.startswith(ZOO)]
    assert shown == [f"{ZOO}[{name}]" for name in OF_EACH_FAMILY]
    assert all(not ZOO_OF_ALL[name].refused for name in OF_EACH_FAMILY)
    assert {ZOO_OF_ALL[name].needs for name in OF_EACH_FAMILY} == {
        entry.needs for entry in ZOO_OF_ALL.values()
    }
    test_file, _, test = ZOO.partition("::")
    assert f"def {test}(" in (ROOT / test_file).read_text()


def test_the_newest_release_has_the_libraries_of_models_and_trainers() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert EXTRAS[NEWEST].split(",") == ["dev", "zoo", "trainers"]
    assert {"dev", "zoo", "trainers"} <= set(extras)
