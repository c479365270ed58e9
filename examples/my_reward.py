"""Rewards of your own: pictures -> one number per picture, higher is better.

python train.py --reward examples/my_reward.py:blueness
"""

import numpy as np


def blueness(images):
    pixels = [np.asarray(image) / 255 for image in images]  # (height, width, 3)
    return [(p[..., 2] - p[..., :2].mean(-1)).mean() for p in pixels]


def win_rate(images, group_size):
    """The share of its group that a picture is bluer than."""
    blue = np.array(blueness(images)).reshape(-1, group_size)  # (N, G)
    return (blue[:, :, None] > blue[:, None]).mean(2).ravel()
