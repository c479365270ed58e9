"""docs/exercises.md: what is emptied is red. With its body it is green, as all of test_grpo.py."""

import inspect
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT

import grpo
from examples.exercise import HOLES, emptied

SOURCE = (ROOT / "grpo.py").read_text()


class Failures(list):
    def pytest_runtest_logreport(self, report):
        self += [report.longreprtext] if report.failed else []


def code_of(names, name):
    return inspect.unwrap(names.get(name) or getattr(names["GRPO"], name))


@pytest.mark.parametrize("name", HOLES)
def test_a_hole_is_red(name, tmp_path, monkeypatch):
    """In this process: the code of the functions is exchanged, wherever they were imported."""
    file = tmp_path / "emptied.py"
    file.write_text(emptied(SOURCE, name))
    names = runpy.run_path(str(file))
    for each in (name, "centre_groups"):
        code = code_of(names, each).__code__
        monkeypatch.setattr(code_of(vars(grpo), each), "__code__", code)
    words = [str(ROOT / "test_grpo.py"), "-k", HOLES[name], "-xqp", "no:cacheprovider"]
    failures = Failures()
    assert pytest.main(words, plugins=[failures]) == pytest.ExitCode.TESTS_FAILED
    assert "NotImplementedError" in failures[0]
    page = (ROOT / "docs" / "exercises.md").read_text()
    assert f"`{name}`" in page and f'`-k "{HOLES[name]}"`' in page


def test_the_file_as_it_was_is_kept(tmp_path):
    (tmp_path / "grpo.py").write_text(SOURCE)
    command = [sys.executable, ROOT / "examples" / "exercise.py", "_nucleus"]
    codes = [subprocess.run(command, cwd=tmp_path, check=False).returncode for _ in range(2)]
    assert codes == [0, 1] and (tmp_path / "answer.py").read_text() == SOURCE
    assert (tmp_path / "grpo.py").read_text() == emptied(SOURCE, "_nucleus") != SOURCE
