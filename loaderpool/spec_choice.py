"""Which spec a loader's batches have: the user's, or what one sample showed."""

from __future__ import annotations

from loaderpool.config import LoaderConfig
from loaderpool.errors import SpecMismatchError
from loaderpool.memory.form import UnitKind, spec_of_batches
from loaderpool.spec import ArraySpec, ElementSpec

__all__ = ["choose_spec"]


def choose_spec(seen: ElementSpec, given: ElementSpec | None, config: LoaderConfig, unit: UnitKind) -> ElementSpec:
    """The spec of a batch, batch axis included.

    Args:
        seen: of what one call of the function returned.
        given: the user's element_spec, of a batch.
        config: the loader's settings.
        unit: what one call of the function makes.

    Raises:
        SpecMismatchError: the given spec has another structure than what the function returns.
    """
    static_rows = config.static_rows
    if given is not None:
        return _as_function_returns(given, seen, static_rows, config, unit)
    if unit == "sample":
        return spec_of_batches(seen, pad=config.pad is not False, ragged=config.ragged, static_rows=static_rows)
    # A whole batch: its first axis is the batch's own, and the last one may be shorter.
    components = tuple(
        ArraySpec((None, *c.shape[1:]) if c.shape else (), c.dtype, c.text, c.ragged) for c in seen.components
    )
    return ElementSpec(seen.structure, components)


def _as_function_returns(
    given: ElementSpec, seen: ElementSpec, static_rows: int | None, config: LoaderConfig, unit: UnitKind
) -> ElementSpec:
    """The given spec, its batch axis as the loader's batches really have it.

    A `tf.string` does not say whether the NumPy side has str or bytes: what the function returns does. An axis of None
    does not say whether `ragged=True` is meant: that setting does.
    """
    batch_size = config.batch_size if unit == "sample" else None
    try:
        in_given_order: list[ArraySpec] = given.structure.flatten(seen.pack())
    except SpecMismatchError:
        raise SpecMismatchError(
            f"element_spec has the structure {given.structure}, but the function returns {seen.structure}"
        ) from None
    components = []
    for component, path, actual in zip(given.components, given.paths, in_given_order, strict=True):
        shape = component.shape
        if batch_size is not None:
            if not shape or shape[0] not in (None, batch_size):
                raise SpecMismatchError(
                    f"element_spec{path} is {component}, but a batch has batch_size={batch_size} rows (give "
                    "None where the last batch may be smaller)"
                )
            shape = (static_rows, *shape[1:])
        text = actual.text if component.text is not None and actual.text is not None else component.text
        is_ragged = component.ragged or (config.ragged and text is None and shape[1:2] == (None,))
        components.append(ArraySpec(shape, component.dtype, text, is_ragged))
    return ElementSpec(given.structure, tuple(components))
