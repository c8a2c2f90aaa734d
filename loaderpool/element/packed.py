"""Spec of batches in each of whose rows several samples are packed.

The samples of a row are joined along their first axis. Two components are added: the number of the
sample in the row, and the place in the sample, for each place of a row:

    sample                     batch
    {"tokens": t}              {"tokens": t, "segment_ids": s, "positions": p}
    ({"tokens": t}, labels)    ({"tokens": t, "segment_ids": s, "positions": p}, labels)
    t                          {"values": t, "segment_ids": s, "positions": p}

They are in the first part of a tuple, because frameworks take the second for labels.
"""

from __future__ import annotations

import numpy as np

from loaderpool.element.spec import ArraySpec, ElementSpec
from loaderpool.element.structure import Structure, named
from loaderpool.errors import SpecMismatchError

_VALUES, _ADDED = "values", ("segment_ids", "positions")
_LEAF = Structure("leaf")


def packed_spec(sample: ElementSpec, rows: int | None, length: int) -> tuple[ElementSpec, int]:
    """Return the spec of batches, and the number of its components before those that are added.

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
    """Return the structure of batches, and the number of its leaves before those that are added."""
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
