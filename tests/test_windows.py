"""What differs on Windows, tried on any machine: separators, and text in another code page."""

import ast
import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

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
