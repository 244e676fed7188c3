"""Put the first and the last grid of a run side by side, for the README.

python tools/demo_picture.py runs/digits docs/demo.png
"""

import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

MARGIN = 28


def main(run, target):
    grids = sorted((Path(run) / "grids").glob("*.png"))
    before, after = (Image.open(path).convert("RGB") for path in (grids[0], grids[-1]))
    picture = Image.new("RGB", (before.width + after.width + MARGIN, before.height + MARGIN), (24, 24, 24))
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(18)
    for image, left, text in ((before, 0, "before"), (after, before.width + MARGIN, "after")):
        picture.paste(image, (left, MARGIN))
        draw.text((left + 8, 4), text, fill=(230, 230, 230), font=font)
    picture.save(target, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
