"""A judge that compares: it ranks the pictures of a group, in place of a score for each.

    python train.py --reward examples/rank_reward.py:rank

Only differences within a group teach, so ranks teach as scores do. But their mean says how often
pictures differ, not how good they are: let --eval-reward name a reward that shows what was learned.
"""

from my_reward import blueness


def rank(images, prompts, group_size):
    """0 for the best picture of its group, -1 for the next: (N*G,)."""
    rewards = []
    for first in range(0, len(images), group_size):  # G pictures of one prompt
        better = judge(images[first : first + group_size], prompts[first])
        rewards += [-count for count in better]
    return rewards


def judge(images, prompt):
    """How many pictures of the group are better than each: (G,). Put your own judge here, such as a
    vision-language model that sees them side by side.

    Pictures that are equally good get equal numbers: an order among them would reward chance.
    """
    scores = blueness(images)
    return [sum(other > own for other in scores) for own in scores]
