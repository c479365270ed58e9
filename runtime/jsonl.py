"""Files of one JSON record per line, such as metrics.jsonl."""

import json

RECORDS = "metrics", "groups", "evaluation"  # .jsonl files of a run


def read_jsonl(path):
    """The records in a file. Damaged lines are left out."""
    records = []
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            records += [record] if record["step"] >= 0 else []
        except (ValueError, LookupError, TypeError):
            if number < len(lines):  # else a kill has cut it short
                print(f"warning: line {number} of {path} is damaged, and left out")
    return records


def as_lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)
