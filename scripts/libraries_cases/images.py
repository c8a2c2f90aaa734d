"""Images and video."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from libraries_cases.arrays import OPEN_IN_SETUP
from libraries_cases.case import (
    Trial,
    case,
    fails_with,
    handle,
    module_in,
    refused,
    refused_with,
    works,
)

SHAPE = (32, 48, 3)


def image(item: int) -> np.ndarray[Any, Any]:
    """Return an image whose pixels depend on its number."""
    return np.random.default_rng(item).integers(0, 256, SHAPE, np.uint8)


def image_files(place: Path, count: int = 24) -> list[str]:
    from PIL import Image

    for item in range(count):
        Image.fromarray(image(item)).save(place / f"{item}.png")
    return [str(place / f"{item}.png") for item in range(count)]


def tiff_of_pages(place: Path) -> str:
    from PIL import Image

    pages = [Image.fromarray(image(item)) for item in range(24)]
    pages[0].save(place / "pages.tiff", save_all=True, append_images=pages[1:])
    return str(place / "pages.tiff")


def video(place: Path) -> str:
    """Write a film of 24 gray pictures, each brighter than the one before."""
    import av

    path = str(place / "film.mp4")
    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.width, stream.height = 64, 48
        stream.pix_fmt = "yuv420p"
        for item in range(24):
            frame = av.VideoFrame.from_ndarray(
                np.full((48, 64, 3), item * 10, np.uint8), format="rgb24"
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


# ---- Pillow ----


@case("Pillow", "pillow", "images, opened lazily or loaded", works)
def pillow_images(place: Path) -> Trial:
    from PIL import Image

    images = [Image.open(path) for path in image_files(place)]
    return Trial(lambda item: np.asarray(images[item]))


@case(
    "Pillow",
    "pillow",
    "file of several pages (TIFF, GIF, WebP)",
    fails_with("AttributeError"),
    OPEN_IN_SETUP,
)
def pillow_pages(place: Path) -> Trial:
    from PIL import Image

    path = tiff_of_pages(place)

    def read(opened: Any, item: int) -> np.ndarray[Any, Any]:
        opened.seek(item)
        return np.asarray(opened)

    return handle(lambda: Image.open(path), read)


@case("Pillow", "pillow", "file of several pages that a module opens on import", works)
def pillow_pages_on_import(place: Path) -> Trial:
    module = module_in(
        place,
        """
        import numpy as np
        from PIL import Image
        opened = Image.open({path})
        def read(item):
            opened.seek(item % 24)
            return np.asarray(opened)
        """,
        path=tiff_of_pages(place),
    )
    return Trial(module.read, range(300))


# ---- OpenCV ----


@case("OpenCV", "opencv-python-headless", "functions; workers use one thread each", works)
def opencv_functions(place: Path) -> Trial:
    import cv2

    paths = image_files(place)
    return Trial(lambda path: cv2.GaussianBlur(cv2.imread(path), (5, 5), 0), paths)


@case(
    "OpenCV",
    "opencv-python-headless",
    "`CLAHE`, `VideoCapture`, `UMat`, `KeyPoint`",
    refused,
    "create it in `setup=`",
)
def opencv_clahe(place: Path) -> Trial:
    import cv2

    return handle(
        lambda: cv2.createCLAHE(2.0, (8, 8)),
        lambda clahe, item: clahe.apply(image(item)[:, :, 0].copy()),
        alike=[cv2.VideoCapture(), cv2.UMat(image(0)), cv2.KeyPoint()],
    )


# ---- augmentation: these draw random numbers ----


@case(
    "Albumentations",
    "albumentations",
    "`Compose`, with or without `seed`: [random](#randomness)",
    works,
)
def albumentations_compose(place: Path) -> Trial:
    import albumentations as A

    transform = A.Compose(
        [A.RandomCrop(16, 16), A.RandomBrightnessContrast(p=1.0), A.GaussNoise(p=1.0)], seed=42
    )
    return Trial(lambda item: transform(image=image(item))["image"], is_random=True)


@case("torchvision", "torchvision", "`transforms.v2`: [random](#randomness)", works)
def torchvision_transforms(place: Path) -> Trial:
    import torch
    from torchvision.transforms import v2

    transform = v2.Compose(
        [v2.RandomResizedCrop(16), v2.ColorJitter(0.5, 0.5), v2.ToDtype(torch.float32)]
    )

    def augment(item: int) -> Any:
        pixels = torch.from_numpy(image(item)).permute(2, 0, 1)
        return transform(pixels).numpy()

    return Trial(augment, is_random=True)


@case("Kornia", "kornia", "augmentations: [random](#randomness)", works)
def kornia_augmentation(place: Path) -> Trial:
    import kornia.augmentation as K
    import torch

    transform = K.AugmentationSequential(
        K.RandomResizedCrop((16, 16)), K.ColorJitter(0.2, 0.2, 0.2, 0.1, p=1.0)
    )

    def augment(item: int) -> Any:
        pixels = torch.from_numpy(image(item)).permute(2, 0, 1)[None].float() / 255
        return transform(pixels)[0].numpy()

    return Trial(augment, is_random=True)


# ---- readers ----


@case("kornia-rs", "kornia-rs", "functions that read images", works)
def kornia_rs_functions(place: Path) -> Trial:
    import kornia_rs

    paths = image_files(place)
    return Trial(lambda path: np.asarray(kornia_rs.io.read_image(path)), paths)


@case("imageio", "imageio", "`imread` in the function", works)
def imageio_functions(place: Path) -> Trial:
    import imageio.v3 as iio

    return Trial(lambda path: iio.imread(path), image_files(place))


@case("imageio", "imageio", "`get_reader`, `imopen`", refused, OPEN_IN_SETUP)
def imageio_reader(place: Path) -> Trial:
    import imageio.v2 as iio_v2
    import imageio.v3 as iio

    path = tiff_of_pages(place)
    return handle(
        lambda: iio.imopen(path, "r", plugin="pillow"),
        lambda file, item: file.read(index=item),
        alike=[iio_v2.get_reader(path)],
    )


@case("scikit-image", "scikit-image", "`ImageCollection`", works)
def skimage_collection(place: Path) -> Trial:
    from skimage.io import ImageCollection

    collection = ImageCollection(image_files(place))
    return Trial(lambda item: np.asarray(collection[item]))


@case("tifffile", "tifffile", "`TiffFile`, `imread(aszarr=True)`", refused, OPEN_IN_SETUP)
def tifffile_file(place: Path) -> Trial:
    import tifffile

    path = place / "pages.tiff"
    tifffile.imwrite(path, np.stack([image(item) for item in range(24)]), photometric="rgb")
    return handle(
        lambda: tifffile.TiffFile(path),
        lambda file, item: file.asarray(key=item),
        alike=[tifffile.imread(path, aszarr=True)],
    )


@case("tifffile", "tifffile", "`memmap`", works)
def tifffile_memmap(place: Path) -> Trial:
    import tifffile

    path = place / "pages.tiff"
    tifffile.imwrite(path, np.stack([image(item) for item in range(24)]), photometric="rgb")
    pages = tifffile.memmap(path, mode="r")
    return Trial(lambda item: pages[item])


@case("OpenSlide", "openslide-python", "`OpenSlide`", refused, OPEN_IN_SETUP)
def openslide_slide(place: Path) -> Trial:
    import openslide
    import tifffile

    path = str(place / "slide.tiff")
    pixels = np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)
    tifffile.imwrite(path, pixels, photometric="rgb", tile=(64, 64))
    return handle(
        lambda: openslide.OpenSlide(path),
        lambda slide, item: np.asarray(slide.read_region((item * 8, item * 8), 0, (32, 32))),
    )


@case("pyvips", "pyvips", "`Image`", refused, OPEN_IN_SETUP)
def pyvips_image(place: Path) -> Trial:
    import pyvips

    (path,) = image_files(place, count=1)
    return handle(
        lambda: pyvips.Image.new_from_file(path),
        lambda opened, item: opened.crop(item, 0, 8, 8).numpy(),
    )


# ---- video ----


@case("PyAV", "av", "container", refused, OPEN_IN_SETUP)
def av_container(place: Path) -> Trial:
    import av

    path = video(place)

    def read(container: Any, item: int) -> np.ndarray[Any, Any]:
        container.seek(0)
        for number, frame in enumerate(container.decode(video=0)):
            if number == item:
                return frame.to_ndarray(format="rgb24")
        raise IndexError(item)

    return handle(lambda: av.open(path), read)


@case("decord", "decord", "`VideoReader`", refused, OPEN_IN_SETUP)
def decord_reader(place: Path) -> Trial:
    import decord

    path = video(place)
    return handle(
        lambda: decord.VideoReader(path, num_threads=1),
        lambda reader, item: reader[item].asnumpy(),
    )


@case(
    "TorchCodec",
    "torchcodec",
    "`VideoDecoder`",
    refused_with("in the memory of this process"),
    OPEN_IN_SETUP,
)
def torchcodec_decoder(place: Path) -> Trial:
    from torchcodec.decoders import VideoDecoder

    path = video(place)
    return handle(
        lambda: VideoDecoder(path, seek_mode="exact"),
        lambda decoder, item: decoder[item].numpy(),
    )
