"""Spec of batches whose rows each contain several samples.

The samples of a row are joined along their first axis. Two components are added. For each place in
a row, they have the number of the sample in the row, and the place in the sample:

    sample                     batch
    {"tokens": t}              {"tokens": t, "segment_ids": s, "positions": p}
    ({"tokens": t}, labels)    ({"tokens": t, "segment_ids": s, "positions": p}, labels)
    t                          {"values": t, "segment_ids": s, "positions": p}

If the sample is a tuple, they are added to its first part, because frameworks use the second part
as labels.
"""

from __future__ import annotations

import numpy as np

from loaderpool.element.spec import ArraySpec, ElementSpec
from loaderpool.element.structure import Structure, named
from loaderpool.errors import SpecMismatchError

_VALUES, _ADDED = "values", ("segment_ids", "positions")
_LEAF = Structure("leaf")


def packed_spec(sample: ElementSpec, rows: int | None, length: int) -> tuple[ElementSpec, int]:
    """Return the spec of packed batches, and the place of the added components in it.

    Args:
        sample: Spec of a sample.
        rows: Rows of each batch; None: the number varies.
        length: Length of each row.

    Raises:
        SpecMismatchError: The samples cannot be packed.
    """
    structure, place = _packed(sample.structure)
    components = []
    for component, path in zip(sample.components, sample.paths, strict=True):
        if component.text is not None or not component.shape:
            got = "strings" if component.text is not None else "a single value"
            raise SpecMismatchError(
                f"{named(path)} is {got}, but order=Packed(...) joins arrays of numbers along "
                "their first axis. Return one number for each token, such as "
                "numpy.full(len(tokens), label)"
            )
        components.append(ArraySpec((rows, length, *component.shape[1:]), component.dtype))
    components[place:place] = [ArraySpec((rows, length), np.int32) for _ in _ADDED]
    return ElementSpec(structure, tuple(components)), place


def item_spec(sample: ElementSpec) -> ElementSpec:
    """Return the spec of batches of single samples, whose first axis varies."""
    components = (ArraySpec((None, None, *c.shape[1:]), c.dtype) for c in sample.components)
    return ElementSpec(sample.structure, tuple(components))


def _packed(structure: Structure) -> tuple[Structure, int]:
    """Return the structure of packed batches, and the place of the added leaves in it."""
    if structure.kind == "leaf":
        return Structure("dict", (_VALUES, *_ADDED), (_LEAF,) * 3), 1
    keys, children = structure.keys, structure.children
    if structure.kind == "dict":
        for key in _ADDED:
            if key in keys:
                raise SpecMismatchError(
                    f"component [{key!r}] is added to batches by order=Packed(...), but the sample "
                    "has one. Give it another name"
                )
        added = Structure("dict", (*keys, *_ADDED), (*children, _LEAF, _LEAF))
        return added, structure.num_leaves
    first, place = _packed(children[0])
    return Structure(structure.kind, keys, (first, *children[1:]), structure.namedtuple), place
