"""Draw the reward curves of a run: python assets/plot.py runs/1 [reward.png]. Needs matplotlib (pip install matplotlib)."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

run = Path(sys.argv[1])
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
names = [name for name in lines[0] if name.startswith("reward/")]
steps, width = np.array([line["step"] for line in lines]), min(10, len(lines))

fig, axes = plt.subplots(1, len(names), figsize=(4.5 * len(names), 2.6), squeeze=False)
for ax, name in zip(axes[0], names):
    values = np.array([line[name] for line in lines], dtype=float)  # null, a step without this reward, becomes NaN
    ax.plot(steps, values, color="#bbbbbb", lw=1, label="mean of a step")
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    ax.plot(steps[width - 1 :], smooth, color="#d02030", lw=2, label=f"mean of the last {width} steps")
    ax.set(title=name.removeprefix("reward/"), xlabel="step", xlim=(steps[0], steps[-1]))
    ax.spines[["top", "right"]].set_visible(False)
axes[0, 0].legend(frameon=False, loc="lower right")
fig.tight_layout()
fig.savefig(sys.argv[2] if len(sys.argv) > 2 else run / "reward.png", dpi=130)
