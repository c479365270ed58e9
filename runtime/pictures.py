"""The pictures that a run saves as it goes on, for viewer/ and for people."""

SIDE = 256  # pixels of a side of a training picture at most, since a run saves thousands of them


def save_pictures(out, place, images, beside, small=False):
    """The G pictures of a prompt, and the pictures that stand beside them, to `out`/`place`-*.

    Args:
        place: such as "groups/000001/3", of the third prompt of a step.
        images: G PIL images.
        beside: {name: a picture or None}, such as the target.
        small: as JPEG files of at most SIDE pixels a side, in place of PNG files.

    Returns {"pictures": G files, "beside": {name: file}}, as they are named in `out`.
    """
    (out / place).parent.mkdir(parents=True, exist_ok=True)

    def save(name, picture):
        file = f"{place}-{name}.{'jpg' if small else 'png'}"
        picture = picture.convert("RGB")  # a copy
        if small:
            picture.thumbnail((SIDE, SIDE))
        picture.save(out / file, quality=90)  # a PNG file has none
        return file

    return {
        "pictures": [save(number, picture) for number, picture in enumerate(images, 1)],
        "beside": {name: save(name, picture) for name, picture in beside.items() if picture},
    }
