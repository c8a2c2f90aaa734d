"""The probe: the first calls of the function, which determine the form of its samples (or batches).

If all samples have one shape, one call is enough. If they are padded or ragged, the samples of the
first batch show which axes vary. If that batch is small, or has only samples of similar length, the
first samples of the next batches are added. The plan alone determines these samples. So the form is
the same for any number of workers, and after a resume.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from loaderpool.element.own_classes import own_classes
from loaderpool.element.spec import ArraySpec, ElementSpec, sample_spec, widened
from loaderpool.element.structure import Structure, convert_leaf
from loaderpool.errors import SourceError, SpecMismatchError
from loaderpool.plan.batches import Plan
from loaderpool.plan.order import Order
from loaderpool.system import clock
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.messages import Ticket
from loaderpool.transport.pickling import send
from loaderpool.worker.rows import none_for
from loaderpool.worker.tickets import Abandoned, Probe, WorkFailed, with_preface
from loaderpool.worker.work import Work, nothing_to_repeat

# Samples that the probe tries at least if errors may be skipped. Smaller: it stops after a few bad
# samples at the start. Larger: an error that all samples have is reported later.
_PROBES = 64
# Samples of the first batch that are checked for varying axes. Smaller: an axis that varies rarely
# is found later, as an error. Larger: with slow samples and large batches, the other workers wait.
_LOOKS = 64
# Samples that are always checked. If the first batch is smaller, samples of the next batches are
# added. The number does not shrink with more threads.
_FEWEST_LOOKS = 8
# Python's own scalars are not converted to arrays, because a spec allows other casts for them.
_IMMUTABLE = frozenset({bool, int, float, complex, str, bytes})
_WITHOUT_OUT = (
    "in the first call, which shows shapes and dtypes, out is None: return a new array there"
)


def probe(work: Work, epoch: int, plan: Plan, feed: int = 0) -> Probe:
    """Call the function for the first sample (or batch) of an epoch. Keep the result, and return
    its form.

    If failing samples are skipped or replaced, the first samples are tried until one succeeds. If
    axes may vary, more samples are checked. A failure among these is ignored here, and is raised
    when that sample's ticket comes.

    Called by workers, and by the main process with `workers=0`.

    Args:
        work: the loader's work.
        epoch: the epoch.
        plan: plan of the epoch.
        feed: arena offset of the stream's table.

    Raises:
        WorkFailed: the function raised, or its result cannot become a batch.
    """
    first_error: WorkFailed | None = None
    tried = 0
    for tried, (positions, start) in enumerate(_starts(work, epoch, plan, feed), start=1):
        stop = len(positions) if work.unit == "batch" else start + 1
        try:
            found = _probe_at(work, epoch, plan.order, positions[start:stop], len(positions))
        except WorkFailed as error:
            first_error = first_error or error
            if not _may_try_more(work, plan, tried):
                break
        else:
            if _may_be_shorter(work, plan, found.rows) and _has_tuple_of(
                found.spec.structure, found.rows
            ):
                _refuse_elements_for_items(work, epoch, plan, positions, found.spec.structure)
            return _look_at_more(work, epoch, plan, found, positions[start + 1 :])
    if first_error is not None:
        raise _without_a_shape(work, first_error, tried)
    from loaderpool.sources.stream import nothing_there  # imported here: empty sources are rare

    raise work.failures.of(SourceError(nothing_there(plan)), epoch)


def _may_try_more(work: Work, plan: Plan, tried: int) -> bool:
    """Return True if the probe may try another sample (or batch) after `tried` failures.

    `on_error` limits the number of failures. Without a limit, the probe tries all samples of the
    epoch if the user gave a spec. It always tries `_PROBES` samples if errors may be skipped.
    """
    policy = work.config.on_error
    if policy.action == "raise" or (policy.action == "replace" and work.unit != "sample"):
        return False
    if tried < _PROBES:
        return True
    if policy.budget is None:
        return work.given_spec is not None and not plan.is_endless
    rows = 0 if plan.is_open else plan.rows_per_epoch
    return policy.allows(tried * (plan.most_rows if work.unit == "batch" else 1), rows)


def _without_a_shape(work: Work, first: WorkFailed, tried: int) -> WorkFailed:
    """Return the probe's first failure, with the reason why it is raised despite `on_error`.

    Args:
        work: The work of this process.
        first: The first failure.
        tried: Number of calls. All of them failed.
    """
    action = work.config.on_error.action
    if action == "raise":
        return first
    if action == "replace" and work.unit != "sample":
        return nothing_to_repeat(first)
    one, many = ("batch", "batches") if work.unit == "batch" else ("sample", "samples")
    text = f"The first {one} failed" if tried == 1 else f"The first {tried:,} {many} all failed"
    if work.given_spec is None:
        text += f', so on_error="{action}" found none that shows the shape'
    return with_preface(first, f"{text}. The first error")


def _look_at_more(
    work: Work, epoch: int, plan: Plan, first: Probe, positions: npt.NDArray[np.int64]
) -> Probe:
    """Return `first`, updated with the axes that vary in further samples.

    These are samples of the first batch at `positions`, and the first samples of other batches.
    """
    config = work.config
    varies = (
        work.unit == "sample"
        and work.given_spec is None
        and (config.pad is not False or config.ragged)
        and not plan.packed_length
    )
    if not varies or not any(component.shape for component in first.spec.components):
        return first
    most = max(_FEWEST_LOOKS, _LOOKS // config.threads)  # the samples are made one after the other
    here = list(positions[: most - 1])
    others = _FEWEST_LOOKS - 1
    # Other batches of a stream may not be there yet, and other batches of generators would move the
    # lanes.
    if plan.is_open:
        others = 0
    elif not plan.rows_vary:  # otherwise the first batch has samples of similar length
        others = max(0, others - len(here))
    batches = range(1, min(1 + others, plan.batches_per_epoch))
    seen, nbytes = first.spec, first.nbytes
    for number, position in enumerate(
        [*here, *(plan.positions(epoch, batch)[0] for batch in batches)]
    ):
        try:
            other = _probe_at(work, epoch, plan.order, np.array([position]), 1)
        except WorkFailed:  # raised again in that sample's own ticket
            continue
        seen = widened(seen, other.spec)
        nbytes = max(nbytes, other.nbytes) if number < len(here) else nbytes
    # No axis was seen to vary, for example if all sentences are cut to one length. So any axis may
    # vary.
    if seen == first.spec:
        open_axes = (ArraySpec((None,) * len(c.shape), c.dtype, c.text) for c in seen.components)
        seen = ElementSpec(seen.structure, tuple(open_axes))
    return first._replace(seen=seen, nbytes=nbytes)


def _starts(
    work: Work, epoch: int, plan: Plan, feed: int
) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
    """Yield the positions of a first batch, and a row of it at which the probe can start.

    The first batches of generators are those of all lanes. A stream has only one, from the feed.
    """
    failures = work.failures
    for batch in range(work.items.first_batches(plan)):
        try:
            ticket = Ticket(epoch=epoch, batch=batch, stop=plan.most_rows, feed=feed)
            positions = work.items.open(ticket, plan).positions
        except Abandoned:
            # Reply with an error, because the main process waits for the probe's result.
            raise failures.of(SourceError("the stream's first items are gone"), epoch) from None
        except failures.catches as error:  # raised by a stream's items or by a generator
            raise failures.of(error, epoch) from None
        for start in range(min(1, len(positions)) if work.unit == "batch" else len(positions)):
            yield positions, start


def _probe_at(
    work: Work, epoch: int, order: Order, positions: npt.NDArray[np.int64], batch_rows: int
) -> Probe:
    """Make one call for these positions, and keep its result for their own ticket.

    They are part of a batch of `batch_rows` rows.
    """
    calls, failures = work.calls, work.failures
    given = order.take(epoch, positions).tolist()
    opened = calls.reader.open(Ticket(epoch=epoch), positions, given)
    indices = opened.indices
    excluded = failures.excluded(epoch, indices)
    if excluded is not None:
        raise WorkFailed(excluded, RuntimeError(excluded.text))
    calls.kept.keep_only(epoch)
    started = clock.monotonic_ns()
    work.progress.note_thread(0, started, indices[0])
    try:
        result = calls.watched(calls.unit, opened, 0, len(indices))
        elapsed = clock.monotonic_ns() - started
        if inspect.isawaitable(result):
            _refuse_awaitable(result, calls.chain.origin)
        if result is None:
            raise none_for(calls.chain.origin, work.unit, indices[0])
        spec = sample_spec(result, work.given_spec, calls.chain.origin)
        leaves = zip(spec.structure.flatten(result), spec.structure.paths, strict=True)
        kept = [_kept(leaf, path) for leaf, path in leaves]
    except failures.catches as error:
        opened.name_sample(error, 0)
        failed = failures.of(error, epoch, indices, int(positions[0]))
        if calls.chain.takes_out and "None" in failed.failure.text:
            failure = failed.failure._replace(text=f"{failed.failure.text} ({_WITHOUT_OUT})")
            raise WorkFailed(failure, error) from None
        raise failed from None
    # In a drawn order, the first use of an item may be at another position.
    if calls.can_reuse_probe and not order.is_drawn:
        calls.kept[positions[0]] = spec.structure.unflatten(kept)
    return Probe(
        spec, spec, sum(map(_nbytes, kept)), len(indices), elapsed, batch_rows, _classes_of(result)
    )


def _refuse_awaitable(result: object, origin: str) -> NoReturn:
    if inspect.iscoroutine(result):
        result.close()  # otherwise Python warns that it was never awaited
    raise SpecMismatchError(
        f"{origin} a {type(result).__name__}, which is awaited only if the function is declared "
        "with `async def`. Write a function `async def fn(item): return await load(item)`, whose "
        "`load(item)` is what returned it"
    )


def _may_be_shorter(work: Work, plan: Plan, rows: int) -> bool:
    """Return True if `batch_fn` made this batch, and will get fewer items for another batch."""
    if work.unit != "batch" or work.config.drop_remainder or rows < 2:
        return False
    varies = plan.is_open or plan.rows_vary or plan.lanes > 0 or plan.order.is_drawn
    return varies or plan.last_rows < rows


def _has_tuple_of(structure: Structure, count: int) -> bool:
    is_one = structure.kind == "tuple" and len(structure.children) == count
    return is_one or any(_has_tuple_of(child, count) for child in structure.children)


def _refuse_elements_for_items(
    work: Work, epoch: int, plan: Plan, positions: npt.NDArray[np.int64], structure: Structure
) -> None:
    """Raise `WorkFailed` if a returned tuple has one element for each item.

    The structure of a shorter batch would then differ. In a batch of two items, a pair of arrays
    also has two elements, so another call with one item less decides. The error concerns all items,
    so none is skipped.
    """
    calls, rows, indices = work.calls, len(positions), plan.order.indices(epoch, positions)
    first = int(positions[0])
    kept = calls.kept.pop(first, None)
    try:
        opened = calls.reader.open(Ticket(epoch=epoch), positions, indices)
        fewer = Structure.of(calls.watched(calls.unit, opened, 0, rows - 1))
    except work.failures.catches:
        # If it matters, it fails again in its own ticket.
        return
    finally:
        calls.kept[first] = kept
    if fewer == structure or not _has_tuple_of(fewer, rows - 1):
        return
    error = SpecMismatchError(
        f"batch_fn returned a tuple of {rows} for {rows} items, and a tuple of {rows - 1} for "
        f"{rows - 1} of them. All batches must have one structure, and the last batch may be "
        "shorter. Choose one:\n"
        "    drop_remainder=True: leave out the shorter batch\n"
        "    batch_fn: return arrays with a batch axis (np.stack; pad what varies)\n"
        "    batch_size=None, no batch_fn: load single samples, and collate them in the training "
        "loop"
    )
    raise work.failures.of(error, epoch, indices, first)


def _classes_of(result: object) -> bytes:
    """Return a pickle of the classes in a result that the function itself defines.

    It is empty if there are none, or if they cannot be pickled.
    """
    classes = own_classes(result)
    if classes is None:
        return b""
    try:
        return send(classes)
    except Exception as error:
        if is_of_a_handler(error):
            raise
        return b""


def _kept(leaf: object, path: str) -> object:
    """Return a copy of the leaf, because the function may refill its buffer (or list) before the
    ticket's turn.
    """
    is_immutable = type(leaf) in _IMMUTABLE or isinstance(leaf, np.generic)
    return leaf if is_immutable else convert_leaf(leaf, path).copy()


def _nbytes(leaf: object) -> int:
    array = np.asarray(leaf)
    if array.dtype != object:
        return array.nbytes
    return sum(
        len(piece) + 8 for piece in array.ravel().tolist() if isinstance(piece, (str, bytes))
    )
