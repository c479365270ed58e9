"""Draw a run's reward curve: python assets/plot.py runs/1 [reward.png]. Needs matplotlib (pip install matplotlib)."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

run = Path(sys.argv[1])
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
steps, reward = np.array([(line["step"], line["reward"]) for line in lines]).T
width = min(9, len(reward))
smooth = np.convolve(reward, np.ones(width) / width, mode="valid")

fig, ax = plt.subplots(figsize=(7, 2.6))
ax.plot(steps, reward, color="#bbbbbb", lw=1, label="mean of a step")
ax.plot(steps[width - 1 :], smooth, color="#d02030", lw=2, label=f"mean of the last {width} steps")
ax.set(xlabel="step", ylabel="reward", xlim=(steps[0], steps[-1]))
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, loc="lower right")
fig.tight_layout()
fig.savefig(sys.argv[2] if len(sys.argv) > 2 else run / "reward.png", dpi=150)
