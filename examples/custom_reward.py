"""A reward of your own, in a file of your own.

    stretto train examples/custom_reward.toml

asks the digits model for pictures whose ink lies to the left. A reward takes media (B, C, H, W) in [0, 1] (video:
(B, F, C, H, W)) and B prompts, and returns one number a sample.
"""


def ink_to_the_left(media, prompts):
    """Share of the ink in the left half of each picture."""
    half = media.shape[-1] // 2
    left, total = media[..., :half].flatten(1).sum(dim=1), media.flatten(1).sum(dim=1)
    return (left / total.clamp_min(1e-6)).tolist()
