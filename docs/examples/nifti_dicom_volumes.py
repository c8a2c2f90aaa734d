"""Train PyTorch on patches of NIfTI and DICOM volumes, several of each volume, and resume in the middle of an epoch.

A volume is decoded once for all its patches: `batch_fn` gets a few volumes and returns their patches.
Install, in a clone: pip install . nibabel pydicom torch
"""

import tempfile
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import torch
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid
from torch import nn

import loaderpool as lp

PATCH, PATCHES = 12, 6  # voxels along each side; patches of a volume


def make_volume(seed):
    """Return a scan in Hounsfield units, and the mask of the bright cubes in it."""
    draws = np.random.default_rng(seed)
    mask = np.zeros((24, 28, 20), np.uint8)
    for _ in range(6):
        x, y, z = draws.integers(0, (18, 22, 14))
        mask[x : x + 6, y : y + 6, z : z + 6] = 1
    return (draws.normal(-200, 60, mask.shape) + np.where(mask, 400, 0)).astype(np.int16), mask


def write_nifti(path, voxels):
    nibabel.save(nibabel.Nifti1Image(voxels, np.diag([1.0, 1.0, 2.0, 1.0])), path)


def write_dicom(folder, voxels):
    """Write one file for each slice. The order of the names is not the order of the slices."""
    folder.mkdir()
    series = generate_uid()
    for z in range(voxels.shape[2]):
        part = pydicom.Dataset()
        part.file_meta = pydicom.dataset.FileMetaDataset()
        part.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        part.SOPClassUID, part.SOPInstanceUID, part.SeriesInstanceUID = (
            CTImageStorage,
            generate_uid(),
            series,
        )
        part.ImagePositionPatient, part.ImageOrientationPatient = [0, 0, 2 * z], [1, 0, 0, 0, 1, 0]
        part.Rows, part.Columns = voxels.shape[:2]
        part.SamplesPerPixel, part.PhotometricInterpretation, part.PixelRepresentation = (
            1,
            "MONOCHROME2",
            0,
        )
        part.BitsAllocated = part.BitsStored = 16
        part.HighBit, part.RescaleSlope, part.RescaleIntercept = 15, 1, -1024
        part.PixelData = (voxels[:, :, z] + 1024).astype("<u2").tobytes()
        part.save_as(folder / f"{z * 7 % voxels.shape[2]:03d}.dcm", enforce_file_format=True)


def read_volume(path):
    """Return the voxels of a NIfTI file, or of a folder with a DICOM series."""
    if not path.is_dir():
        return np.asarray(nibabel.load(path).dataobj)
    parts = sorted(
        map(pydicom.dcmread, path.iterdir()), key=lambda part: part.ImagePositionPatient[2]
    )
    return np.stack(
        [part.pixel_array * part.RescaleSlope + part.RescaleIntercept for part in parts], axis=-1
    )


def cut_patches(items, rng):
    """Return the patches of a few volumes, half of them around a voxel of the mask."""
    images, masks = [], []
    for scan_path, mask_path in items:
        scan, mask = read_volume(scan_path), read_volume(mask_path)
        bright = np.argwhere(mask)
        for number in range(PATCHES):
            corner = rng.integers(0, np.array(scan.shape) - PATCH + 1)
            if number % 2:
                corner = np.clip(rng.choice(bright) - PATCH // 2, 0, np.array(scan.shape) - PATCH)
            cut = tuple(slice(start, start + PATCH) for start in corner)
            images.append(scan[cut].astype(np.float32) / 200)
            masks.append(mask[cut])
    return np.stack(images)[:, None], np.stack(masks)


def make(items, workers):
    return lp.Loader(
        items, batch_fn=cut_patches, batch_size=3, shuffle=True, seed=1, workers=workers
    )


def batches_of(loader):
    with loader:
        return [(images.copy(), masks.copy()) for images, masks in loader]


def same(first, second):
    return len(first) == len(second) and all(map(np.array_equal, sum(first, ()), sum(second, ())))


torch.manual_seed(0)
model = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 2, 1))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
with tempfile.TemporaryDirectory() as folder:
    items = []
    for number in range(12):
        scan, mask = make_volume(number)
        scan_path = Path(folder, f"{number}{('.nii', '.nii.gz', '')[number % 3]}")
        mask_path = Path(folder, f"{number}-mask.nii.gz")
        (write_nifti if number % 3 < 2 else write_dicom)(scan_path, scan)
        write_nifti(mask_path, mask)
        assert np.array_equal(read_volume(scan_path), scan) and np.array_equal(
            read_volume(mask_path), mask
        )
        items.append((scan_path, mask_path))

    assert same(batches_of(make(items, 2)), batches_of(make(items, 0)))
    with make(items, 2) as loader:
        for _ in range(8):
            right = 0
            for images, masks in loader.as_torch():
                assert images.shape == (3 * PATCHES, 1, PATCH, PATCH, PATCH)
                scores = model(images)
                loss = nn.functional.cross_entropy(scores, masks.long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                right += float((scores.argmax(1) == masks).float().mean())
        accuracy = right / len(loader)
        batches = iter(loader)
        next(batches)
        state = batches.state_dict()
        rest = [(images.copy(), masks.copy()) for images, masks in batches]
    again = make(items, 1)
    again.load_state_dict(state)
    assert same(batches_of(again), rest)

print(
    f"{len(items)} volumes, {PATCHES} patches of each: {accuracy:.1%} of voxels right in the last of 8 epochs"
)
assert accuracy > 0.95
