"""What differs on Windows, tried on any machine: separators, and text in another code page."""

import ast
import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_docs import SOURCES

from runtime import model_card


def test_a_card_loads_a_model_in_a_folder_of_windows(one_step):
    values = json.loads((one_step / "settings.json").read_text())
    settings = SimpleNamespace(**values | {"model": r"C:\Users\new"})
    evaluated = [json.loads(line) for line in (one_step / "evaluation.jsonl").open()]
    records = {"groups": [{"prompt": "x"}], "evaluation": evaluated}
    run = SimpleNamespace(records=records, trainers=["adapter"], saved=1, settings=settings)
    text = model_card.card("adapter", run, ["adapter"])
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert settings.model in names


@pytest.mark.parametrize("codes", ["cp1252", "cp936"])
def test_a_code_page_without_chinese_letters_ends_no_run(judged, monkeypatch, codes):
    """Others are printed as they are."""
    text = "# type: 颜色\na red circle\n# type: 数量\na blue cross\n"
    Path("types.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), codes))
    assert judged("--eval-prompts types.txt --eval-count 2 --steps 1 --out run") == 0
    sys.stdout.flush()
    lines = sys.stdout.buffer.getvalue().decode(codes)
    for word in ("颜色", "数量"):
        assert f"- {word if codes == 'cp936' else ascii(word)[1:-1]} " in lines


def opens_text(call):
    """Whether a call reads or writes a text file in an encoding that differs by machine."""
    name = getattr(call.func, "attr", getattr(call.func, "id", None))
    given = [ast.unparse(each) for each in call.args]
    named = {each.arg for each in call.keywords}
    if name == "open" and not ast.unparse(call.func).startswith(("Image.", "os.")):
        binary = any("b'" in mode for mode in given[-1:])
        return "encoding" not in named and not binary
    encoding = {"read_text": 0, "write_text": 1}.get(name, 99)  # its place among the arguments
    return encoding != 99 and len(given) <= encoding and "encoding" not in named


def test_text_files_are_in_utf_8():
    found = {}
    for file in SOURCES:
        calls = [x for x in ast.walk(ast.parse(file.read_text("utf-8"))) if type(x) is ast.Call]
        found[file] = [ast.unparse(each) for each in calls if opens_text(each)]
    assert len(found) > 30 and not any(found.values()), found
