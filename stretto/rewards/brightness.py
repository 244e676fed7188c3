"""The least reward there is: how bright the picture is. For any media, and for trying a recipe out.

Its hazard is that it is optimised by a white frame; it teaches nothing.
"""

from typing import Any

from torch import Tensor

__all__ = ["brightness"]


def brightness(media: Tensor, prompts: list[str], **metadata: Any) -> Tensor:
    """Mean over channels, frames and pixels, (B,) in [0, 1].

    Media are (B, C, H, W), or (B, F, C, H, W) for video, in [0, 1]. Prompts and metadata are not looked at.
    """
    return media.float().flatten(1).mean(1)
