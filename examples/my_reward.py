"""A reward of your own: pictures -> one number per picture, higher is better.

python train.py --reward examples/my_reward.py:blueness
"""

import numpy as np


def blueness(images):
    """Mean blue less the mean of red and green, in -1..1, a float.

    Not image.resize((1, 1)), which weighs the centre more and rounds: pictures that differ little
    would get equal rewards, and a group of equal rewards teaches nothing.
    """
    pixels = [np.asarray(image) / 255 for image in images]  # (height, width, 3)
    return [(p[..., 2] - p[..., :2].mean(-1)).mean() for p in pixels]
