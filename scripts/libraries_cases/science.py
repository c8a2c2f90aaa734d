"""Medicine, maps and molecules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from libraries_cases.arrays import OPEN_IN_SETUP, table
from libraries_cases.case import Trial, case, handle, module_in, refused, refused_with, works

SMILES = ["C" * length + end for end in ("O", "N", "Cl") for length in range(1, 9)]


def volume() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=(8, 8, 24)).astype(np.float32)


def nifti(place: Path) -> str:
    import nibabel

    path = str(place / "volume.nii.gz")
    nibabel.save(nibabel.Nifti1Image(volume(), np.eye(4)), path)
    return path


@case("NiBabel", "nibabel", "image", works)
def nibabel_image(place: Path) -> Trial:
    import nibabel

    opened = nibabel.load(nifti(place))
    return Trial(lambda item: np.asarray(opened.dataobj[:, :, item]))


@case(
    "NiBabel", "nibabel", "image with `keep_file_open=True`, after a read", refused, OPEN_IN_SETUP
)
def nibabel_kept_open(place: Path) -> Trial:
    import nibabel

    path = nifti(place)
    return handle(
        lambda: nibabel.load(path, keep_file_open=True),
        lambda opened, item: np.asarray(opened.dataobj[:, :, item]),
    )


@case("NiBabel", "nibabel", "the same, opened by a module on import", works)
def nibabel_on_import(place: Path) -> Trial:
    module = module_in(
        place,
        """
        import nibabel
        import numpy as np
        opened = nibabel.load({path}, keep_file_open=True)
        np.asarray(opened.dataobj[:, :, 0])
        def read(item):
            return np.asarray(opened.dataobj[:, :, item % 24])
        """,
        path=nifti(place),
    )
    return Trial(module.read, range(300))


@case("SimpleITK", "SimpleITK", "images, transforms; return `GetArrayFromImage`", works)
def simpleitk_image(place: Path) -> Trial:
    import SimpleITK as sitk

    opened = sitk.GetImageFromArray(volume())
    return Trial(lambda item: sitk.GetArrayFromImage(opened[item, :, :]))


@case("SimpleITK", "SimpleITK", "filters, readers", refused, "create it in `setup=`")
def simpleitk_filter(place: Path) -> Trial:
    import SimpleITK as sitk

    pixels = volume()

    def blurred(gaussian: Any, item: int) -> np.ndarray[Any, Any]:
        return sitk.GetArrayFromImage(gaussian.Execute(sitk.GetImageFromArray(pixels[:, :, item])))

    reader = sitk.ImageFileReader()
    return handle(lambda: sitk.DiscreteGaussianImageFilter(), blurred, alike=[reader])


@case("pydicom", "pydicom", "`Dataset`", works)
def pydicom_dataset(place: Path) -> Trial:
    import pydicom
    from pydicom.data import get_testdata_file

    dataset = pydicom.dcmread(get_testdata_file("CT_small.dcm"), defer_size=1024)
    return Trial(lambda item: dataset.pixel_array[item : item + 4].astype(np.float32))


@case("MONAI", "monai", "transforms: [random](#randomness)", works)
def monai_transforms(place: Path) -> Trial:
    from monai.transforms import Compose, RandGaussianNoise, RandSpatialCrop

    transform = Compose(
        [RandSpatialCrop((4, 4, 4), random_size=False), RandGaussianNoise(prob=1.0)]
    )
    transform.set_random_state(0)
    pixels = volume()[None]
    return Trial(lambda item: np.asarray(transform(pixels)), is_random=True)


@case("TorchIO", "torchio", "`SubjectsDataset` as the source: [random](#randomness)", works)
def torchio_subjects(place: Path) -> Trial:
    import torch
    import torchio

    pixels = torch.from_numpy(volume())[None]
    subjects = [
        torchio.Subject(scan=torchio.ScalarImage(tensor=pixels + item)) for item in range(24)
    ]
    transform = torchio.Compose([torchio.RandomNoise(), torchio.RandomFlip()])
    dataset = torchio.SubjectsDataset(subjects, transform=transform)
    return Trial(lambda subject: subject["scan"].data.numpy(), dataset, is_random=True)


def geotiff(place: Path) -> str:
    import rasterio

    path = str(place / "map.tif")
    profile = {"driver": "GTiff", "width": 64, "height": 96, "count": 1, "dtype": "float32"}
    with rasterio.open(path, "w", **profile, tiled=True, blockxsize=16, blockysize=16) as file:
        file.write(np.arange(96 * 64, dtype=np.float32).reshape(1, 96, 64))
    return path


def read_window(file: Any, item: int) -> Any:
    from rasterio.windows import Window

    return file.read(1, window=Window(0, item * 4, 64, 4))


@case("rasterio", "rasterio", "`DatasetReader`, `MemoryFile`", refused, OPEN_IN_SETUP)
def rasterio_reader(place: Path) -> Trial:
    import rasterio

    path = geotiff(place)
    memory = rasterio.MemoryFile(Path(path).read_bytes())
    return handle(lambda: rasterio.open(path), read_window, alike=[memory])


@case("rasterio", "rasterio", "`DatasetReader` that a module opens on import", works)
def rasterio_on_import(place: Path) -> Trial:
    module = module_in(
        place,
        """
        import rasterio
        from rasterio.windows import Window
        opened = rasterio.open({path})
        def read(item):
            return opened.read(1, window=Window(0, item % 24 * 4, 64, 4))
        """,
        path=geotiff(place),
    )
    return Trial(module.read, range(300))


@case("laspy", "laspy", "`LasReader`", refused, OPEN_IN_SETUP)
def laspy_reader(place: Path) -> Trial:
    import laspy

    path = str(place / "points.las")
    points = laspy.create()
    points.x = np.arange(240)
    points.y = np.arange(240)
    points.z = np.arange(240)
    points.write(path)

    def read(reader: Any, item: int) -> np.ndarray[Any, Any]:
        reader.seek(item * 10)
        return np.array(reader.read_points(10).X)

    return handle(lambda: laspy.open(path), read)


@case(
    "laspy",
    "laspy",
    "`LasData`",
    refused_with("could not load the function and the source: RecursionError"),
    "read it in `setup=` or in the function",
)
def laspy_data(place: Path) -> Trial:
    import laspy

    path = str(place / "points.las")
    points = laspy.create()
    points.x = np.arange(24)
    points.write(path)
    return handle(lambda: laspy.read(path), lambda data, item: np.float64(data.x[item]))


@case("trimesh", "trimesh", "`Trimesh`", works)
def trimesh_mesh(place: Path) -> Trial:
    import trimesh

    mesh = trimesh.creation.icosphere(subdivisions=1)
    return Trial(lambda item: np.asarray(mesh.triangles[item]))


@case("RDKit", "rdkit", "`Mol`", works)
def rdkit_molecules(place: Path) -> Trial:
    from rdkit import Chem
    from rdkit.Chem import Descriptors

    molecules = [Chem.MolFromSmiles(text) for text in SMILES]
    return Trial(lambda item: Descriptors.MolWt(molecules[item]))


@case("RDKit", "rdkit", "fingerprint generators, `SDMolSupplier`", refused, "create it in `setup=`")
def rdkit_generator(place: Path) -> Trial:
    from rdkit import Chem
    from rdkit.Chem import rdFingerprintGenerator

    molecules = [Chem.MolFromSmiles(text) for text in SMILES]
    return handle(
        lambda: rdFingerprintGenerator.GetMorganGenerator(fpSize=64),
        lambda generator, item: generator.GetFingerprintAsNumPy(molecules[item]),
        alike=[Chem.SDMolSupplier()],
    )


def fasta(place: Path) -> str:
    path = place / "genes.fasta"
    generator = np.random.default_rng(0)
    texts = [f">gene{item}\n{''.join(generator.choice(list('ACGT'), 50))}\n" for item in range(24)]
    path.write_text("".join(texts), encoding="utf-8")
    return str(path)


def as_codes(text: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(str(text).encode(), np.uint8)


@case("Biopython", "biopython", "`SeqIO.index`", refused, OPEN_IN_SETUP)
def biopython_index(place: Path) -> Trial:
    from Bio import SeqIO

    path = fasta(place)
    return handle(
        lambda: SeqIO.index(path, "fasta"),
        lambda index, item: as_codes(index[f"gene{item}"].seq),
    )


@case("pysam", "pysam", "`FastaFile`, `AlignmentFile`", refused, OPEN_IN_SETUP)
def pysam_fasta(place: Path) -> Trial:
    import pysam

    path = fasta(place)
    pysam.faidx(path)
    return handle(
        lambda: pysam.FastaFile(path),
        lambda file, item: as_codes(file.fetch(f"gene{item}")),
        alike=[
            pysam.AlignmentFile(
                str(place / "reads.sam"), "w", reference_names=["a"], reference_lengths=[9]
            )
        ],
    )


@case("pyfaidx", "pyfaidx", "`Fasta`", refused, OPEN_IN_SETUP)
def pyfaidx_fasta(place: Path) -> Trial:
    import pyfaidx

    path = fasta(place)
    return handle(
        lambda: pyfaidx.Fasta(path),
        lambda file, item: as_codes(file[f"gene{item}"][:]),
    )


@case("PyTorch Geometric", "torch-geometric", "`Data` in a list; return its arrays", works)
def torch_geometric_data(place: Path) -> Trial:
    import torch
    from torch_geometric.data import Data

    edges = torch.tensor([[0, 1], [1, 0]])
    graphs = [
        Data(x=torch.from_numpy(table()[item][:, None]), edge_index=edges) for item in range(24)
    ]
    return Trial(lambda graph: {"x": graph.x.numpy(), "edges": graph.edge_index.numpy()}, graphs)


@case(
    "PyTorch Geometric",
    "torch-geometric",
    "`Data` as the result",
    refused_with("of type Data"),
    "return its arrays",
)
def torch_geometric_result(place: Path) -> Trial:
    import torch
    from torch_geometric.data import Data

    return Trial(lambda item: Data(x=torch.ones(3, 1) * item))
