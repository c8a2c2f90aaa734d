#!/usr/bin/env bash
# Pillow 13.0.0: an image file of several frames can be pickled, and its copy shows the first frame,
# but seek() and tell() of the copy fail.
#
# Expected: a copy of the current frame as a plain Image, or one that can seek.
# Seen: the copy is a TiffImageFile, GifImageFile, PngImageFile or WebPImageFile without what seek()
# needs: AttributeError, no attribute '_min_frame'.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check pillow==13.0.0
cd "$folder"
"$folder/venv/bin/python" - <<'CODE'
import pickle

from PIL import Image

frames = [Image.new("L", (4, 4), value) for value in (0, 100, 200)]
for kind in ("tif", "gif", "png", "webp"):
    frames[0].save(f"frames.{kind}", save_all=True, append_images=frames[1:])
    with Image.open(f"frames.{kind}") as opened:
        assert opened.n_frames == 3
        loaded = pickle.loads(pickle.dumps(opened))
    assert type(loaded) is type(opened) and loaded.size == (4, 4)
    try:
        loaded.seek(1)
    except AttributeError as error:
        print(type(loaded).__name__, "->", error)
        assert "_min_frame" in str(error)
    else:
        raise SystemExit(f"{kind}: seek() works by now")
CODE
