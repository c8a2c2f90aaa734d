"""Hints in errors: the name to write instead of another library's or a misspelled one."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from loaderpool.errors import ArgumentError, brief
from loaderpool.system.annotations import Function, signature_of

_LOAD_AHEAD = "Remove it: workers load batches ahead, within Limits(memory=...)"
_NO_EPOCHS = (
    "Each iteration is one epoch. Write loader.for_keras(epochs={0}) or "
    "loader.as_dataset(epochs={0})"
)
_NO_SIGNATURE = (
    "Remove it: the structure is found from the first sample. Otherwise write element_spec=..."
)
_WITHOUT_HEADER = (
    "Remove it, and leave out the first line in your own source: __getitem__(index) reads "
    "line index + 1"
)
_BUDGET = "Write order=TokenBudget(lengths, max_tokens={0}), without batch_size="
_PACKED = "Write order=Packed(lengths, length={0})"
_LONGEST = f"{_PACKED} to pack samples into rows. To truncate, do so in fn"
_BLOCKS = "Write order=Blocks(rows={0})"
_KEPT = "Use the object that you passed as source="
_YIELDS_ARRAYS = "Write iter(loader), which yields NumPy arrays"
# Hints for arguments of other libraries, and for those of another part of loaderpool. "{0}" is the
# value passed. A test checks that each sentence names things that exist.
ARGUMENTS = {
    "num_workers": "Write workers={0}",
    "n_workers": "Write workers={0}",
    "n_jobs": "Write workers={0}",
    "num_parallel_calls": "Write workers={0}",
    "use_multiprocessing": "Remove it: workers are processes",
    "multiprocessing_context": 'Write workers=Pool(n, start="spawn")',
    "persistent_workers": "Remove it: workers stay from epoch to epoch",
    "worker_init_fn": "Write setup=function, which is called without arguments",
    "prefetch": _LOAD_AHEAD,
    "prefetch_factor": _LOAD_AHEAD,
    "max_queue_size": _LOAD_AHEAD,
    "pin_memory": (
        'Remove it. Write loader.as_torch(device="cuda") to copy batches to the GPU ahead'
    ),
    "device": (
        "Write loader.as_torch(device={0}), loader.as_dataset(device={0}) or "
        "loader.as_jax(sharding=...)"
    ),
    "batchsize": "Write batch_size={0}",
    "batch": "Write batch_size={0}",
    "drop_last": "Write drop_remainder={0}",
    "padding": "Write pad=True",
    "collate_fn": "Write batch_fn=function, which gets a batch's items as a list and returns the "
    "batch",
    "dataset": "Write source={0}",
    "map_func": "Write fn={0}",
    "func": "Write fn={0}",
    "function": "Write fn={0}",
    "preprocessing_function": "Write fn={0}",
    "transform": "Write fn=function, or augment=function if the results of fn are cached",
    "sampler": "Write order={0}",
    "batch_sampler": "Write order={0}, without batch_size=",
    "max_tokens": _BUDGET.format("{0}"),
    "max_duration": _BUDGET.format("{0}"),
    "max_batch_tokens": _BUDGET.format("{0}"),
    "max_rows": (
        "Write order=TokenBudget(lengths, max_tokens=n, max_rows={0}), without batch_size="
    ),
    "group_by_length": (
        f"{_BUDGET.format('n')}. Or write buckets=Buckets(lengths, boundaries=[...])"
    ),
    "packing": _PACKED.format("n"),
    "packed": _PACKED.format("n"),
    "pack": _PACKED.format("n"),
    "max_length": _LONGEST,
    "max_seq_len": _LONGEST,
    "max_seq_length": _LONGEST,
    "blocks": _BLOCKS,
    "block_size": _BLOCKS,
    "chunk_size": _BLOCKS,
    "chunks": _BLOCKS,
    "indices": "Write order={0}",
    "subset": "Write order={0}",
    "return_index": "Write batch_indices={0}",
    "return_indices": "Write batch_indices={0}",
    "patches_per_volume": "Write samples_per_item={0}",
    "skip_batches": "Write loader.skip_batches({0})",
    "weights": "Write order=Weighted({0})",
    "num_samples": "Write order=Weighted(weights, num_samples={0})",
    "replacement": "Write order=Weighted(weights, replacement={0})",
    "in_order": "Write deterministic={0}",
    "lengths": (
        "Write buckets=Buckets({0}, boundaries=[...]), order=TokenBudget({0}, max_tokens=n) or "
        "order=Packed({0}, length=n)"
    ),
    "boundaries": "Write buckets=Buckets(lengths, boundaries={0})",
    "bucket_boundaries": "Write buckets=Buckets(lengths, boundaries={0})",
    "batch_sizes": "Write buckets=Buckets(lengths, boundaries, batch_sizes={0})",
    "bucket_batch_sizes": "Write buckets=Buckets(lengths, boundaries, batch_sizes={0})",
    "skip_errors": 'Write on_error="skip"',
    "ignore_errors": 'Write on_error="skip"',
    "buffer_size": "Write shuffle={0}, the shuffle window of a stream",
    "generator": "Write seed=n",
    "random_state": "Write seed={0}",
    "random_seed": "Write seed={0}",
    "rng": "Write seed=n: a parameter rng of fn gets a generator for each sample",
    "epochs": _NO_EPOCHS,
    "num_epochs": _NO_EPOCHS,
    "repeat": _NO_EPOCHS,
    "class_weight": "Write loader.for_keras(class_weight={0})",
    "class_weights": "Write loader.for_keras(class_weight={0})",
    "shards": "Write Loader.from_generator(make_generator, shards={0})",
    "cycle_length": ("Write Loader.from_generator(make_generator, shards=..., cycle_length={0})"),
    "copies": "Write Loader.from_generator(make_generator, copies={0})",
    "shard_lengths": ("Write Loader.from_generator(make_generator, shards=..., shard_lengths={0})"),
    "output_signature": _NO_SIGNATURE,
    "output_types": _NO_SIGNATURE,
    "output_shapes": _NO_SIGNATURE,
    "num_shards": "Write shard=Shard(num_shards={0}, index=n)",
    "num_replicas": "Write shard=Shard(num_shards={0}, index=n)",
    "world_size": "Write shard=Shard(num_shards={0}, index=n)",
    "rank": "Write shard=Shard(num_shards=n, index={0})",
    "compression_type": "Remove it: compression is detected by the content of each file",
    "timeout": "Write limits=Limits(timeout_s={0})",
    "timeout_s": "Write limits=Limits(timeout_s={0})",
    "memory": "Write limits=Limits(memory={0})",
    "restarts": "Write limits=Limits(restarts={0})",
    "restarts_per_item": "Write limits=Limits(restarts_per_item={0})",
    "max_bytes": 'Write cache=Cache("memory", max_bytes={0})',
}
# Hints for methods and classes of other libraries.
ATTRIBUTES = {
    "batch": "Write Loader(..., batch_size=n)",
    "padded_batch": "Write Loader(..., batch_size=n, pad=True)",
    "unbatch": "Write Loader(..., batch_size=None)",
    "map": "Write Loader(source, fn)",
    "filter": (
        'Filter the items before: Loader([*filter(keep, items)], fn). Or write on_error="skip"'
    ),
    "shuffle": "Write Loader(..., shuffle=True)",
    "cache": 'Write Loader(..., cache="memory")',
    "shard": "Write Loader(..., shard=Shard(num_shards, index))",
    "prefetch": _LOAD_AHEAD,
    "take": "Write itertools.islice(loader, n)",
    "skip": "Write loader.skip_batches(n), or itertools.islice(loader, n, None)",
    "repeat": f"{_NO_EPOCHS.format('n')}. Without an end: loader.for_keras(epochs=None)",
    "next": "Write next(iter(loader))",
    "reset": "Write iter(loader), which begins the next epoch. Set loader.epoch = 0 before it to "
    "begin again",
    "set_epoch": "Set loader.epoch before iter(loader)",
    "dataset": _KEPT,
    "source": _KEPT,
    "fit": "Pass loader.for_keras() to the model's fit",
    "to_tf": "Write loader.as_dataset()",
    "as_tf": "Write loader.as_dataset()",
    "as_numpy": _YIELDS_ARRAYS,
    "iter_batches": _YIELDS_ARRAYS,
    "save": "Write loader.state_dict()",
    "load": "Write loader.load_state_dict(state)",
    "from_generator": "Write Loader.from_generator(make_generator, shards=...)",
    "from_sequence": "Write Loader.from_sequence(sequence)",
    "from_tensor_slices": "Write Loader((x, y))",
    "WebDataset": "Write TarSamples(paths)",
    "IterableDataset": "Write Loader.from_generator(make_generator, shards=...)",
    "Sampler": "Write Loader(..., order=sampler)",
    "BatchSampler": "Write Loader(..., order=sampler)",
    "RandomSampler": "Write Loader(..., shuffle=True)",
    "SubsetRandomSampler": "Write Loader(..., order=indices)",
    "WeightedRandomSampler": "Write Loader(..., order=Weighted(weights, num_samples=n))",
    "SequentialSampler": "Write Loader(dataset, batch_size=n)",
    "Subset": "Write Loader(..., order=indices)",
    "LengthGroupedSampler": "Write Loader(..., order=TokenBudget(lengths, max_tokens=n))",
    "DynamicBucketingSampler": "Write Loader(..., order=TokenBudget(lengths, max_tokens=n))",
    "PackedDataset": "Write Loader(..., order=Packed(lengths, length=n))",
    "ConcatDataset": "Write mix(sources)",
    "interleave_datasets": "Write mix(sources, weights=[...])",
    "sample_from_datasets": "Write mix(sources, weights=[...])",
    "zip": "Write zip_sources(first, second)",
    "DistributedSampler": 'Write Loader(..., shuffle=True, shard="auto")',
    "__getitem__": "Write next(iter(loader)) for the first batch, or itertools.islice(loader, n)",
    "__next__": "Write next(iter(loader))",
    "DataLoader": "Write Loader(dataset, batch_size=n, shuffle=True)",
    "Dataset": "Write Loader(source, fn), with a list, an array or any object that has items as "
    "the source",
    "BackupCallback": "It is in loaderpool.adapters.keras",
    "ReportCallback": "It is in loaderpool.adapters.keras",
    "LoaderState": "It is in loaderpool.adapters.tensorflow",
}
# Settings of a loader that users also try to pass to its order or source.
_OF_LOADER = ("batch_size", "drop_remainder", "pad", "seed", "shuffle", "workers")
_HEADERS = ("skip", "skip_header", "skip_lines", "skip_rows", "skiprows", "header")
_FUNCTIONS = ("fn", "batch_fn", "augment", "setup", "make_generator")
# Similarity (`difflib`) above which a wrong name stands for a known one. Smaller: "n" would mean
# `fn`. Larger: "num_workers" would not mean the `workers` of a pool.
_SIMILAR = 0.75
_P = ParamSpec("_P")
_Returned = TypeVar("_Returned")


def known_names_only(function: Callable[_P, _Returned]) -> Callable[_P, _Returned]:
    """Decorate a function so that unknown or surplus arguments raise an error with a hint."""
    known = frozenset(_names_of(function))
    code = inspect.unwrap(function).__code__
    takes_any = bool(code.co_flags & inspect.CO_VARARGS)  # as `zip_sources` does

    @functools.wraps(function)
    def checked(*given: _P.args, **named: _P.kwargs) -> _Returned:
        if len(given) > code.co_argcount and not takes_any:
            raise _too_many_arguments(function, given)
        if not named.keys() <= known:
            names = _names_of(function)
            if _passes_on(function):  # a class method passes its arguments on to its class
                make: Function = given[0].__init__  # type: ignore[misc]
                if _passes_on(make):  # a subclass whose `__init__` accepts any name
                    return function(*given, **named)
                names += _names_of(make)
            for name in named:
                if name not in names:
                    raise _unknown_argument(function, names, name, given, named)
        return function(*given, **named)

    return checked


def meant_by(name: str) -> str:
    """Return loaderpool's name of an argument that others call `name`; if there is none, `name`."""
    found = re.match(r"Write (\w+)=", ARGUMENTS.get(name, ""))
    return name if found is None else found[1]


def _names_of(function: Function) -> tuple[str, ...]:
    """Return the names of a function's parameters, in their order."""
    code = inspect.unwrap(function).__code__
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return names


def _passes_on(function: Function) -> bool:
    """Return True if a function accepts any keyword argument."""
    return bool(inspect.unwrap(function).__code__.co_flags & inspect.CO_VARKEYWORDS)


def _owner_of(function: Function, given: tuple[Any, ...]) -> str:
    """Return what messages call the function: a class for its constructor."""
    name = function.__name__
    if _names_of(function)[:1] == ("cls",):
        return f"{given[0].__name__}.{name}"
    return type(given[0]).__name__ if name == "__init__" else name


def _too_many_arguments(function: Function, given: tuple[Any, ...]) -> ArgumentError:
    """Return the error for a call with more positional arguments than the function takes."""
    code = inspect.unwrap(function).__code__
    unnamed = [name for name in code.co_varnames[: code.co_argcount] if name not in ("self", "cls")]
    extra = given[code.co_argcount]
    likely = "fn" if callable(extra) else "batch_size" if type(extra) is int else ""
    names = [*_names_of(function), *(_names_of(given[0].__init__) if _passes_on(function) else ())]
    example = (
        f", such as {likely}={_shown_value(extra)}"
        if likely in names and likely not in unnamed
        else ""
    )
    takes = (
        f"takes only {_listed(unnamed)} without a name"
        if unnamed
        else "takes no argument without a name"
    )
    return ArgumentError(
        f"{_owner_of(function, given)} {takes}, got {brief(extra)}{' after that' * bool(unnamed)}. "
        f"Write the name of the argument{example}"
    )


def _unknown_argument(
    function: Function,
    names: tuple[str, ...],
    name: str,
    given: tuple[Any, ...],
    named: Mapping[str, Any],
) -> ArgumentError:
    """Return the error for an argument that is not in `names`.

    `given` and `named` are the arguments of the call.
    """
    owner = _owner_of(function, given)
    public = [each for each in names if each not in ("self", "cls") and not each.startswith("_")]
    arguments = {**dict(zip(names, given, strict=False)), **named}
    hint = _hint_for_argument(name, _shown_value(named[name]), public, arguments)
    return ArgumentError(f"{owner} has no argument {brief(name)}. {hint}")


def _hint_for_argument(
    name: str, shown: str, known: list[str], arguments: Mapping[str, Any]
) -> str:
    is_loader = "batch_size" in known
    hint = f"{ARGUMENTS[name].format(shown)}." if name in ARGUMENTS else ""
    if partial := _partial_for(name, shown, arguments):
        return partial
    if hint and (is_loader or name == "compression_type"):
        return hint
    if name in _HEADERS and "strip" in known:
        return f"{_WITHOUT_HEADER}."
    if near := nearest(name, known):
        return f"Did you mean {near}={shown}?"
    if meant_by(name) in _OF_LOADER:
        return f"Pass it to Loader. {hint}".rstrip()
    of_loader = _names_of(type(arguments["self"]).__init__) if "self" in arguments else ()
    # the call is of a method of a loader
    if "batch_size" in of_loader and (hint or name in of_loader):
        is_whole = hint.startswith(("Remove", "Write loader."))
        return hint if is_whole else f"Pass it to Loader. {hint}".rstrip()
    return f"Its arguments are {_listed(list(dict.fromkeys(known)))}."


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _partial_for(name: str, shown: str, arguments: Mapping[str, Any]) -> str:
    """Return the hint for an argument that one of the user's functions has; "" if none has it."""
    for role in _FUNCTIONS:
        function = arguments.get(role)
        signature = signature_of(function, follow_wrapped=True) if callable(function) else None
        if (
            signature is not None
            and name in signature.parameters
            and name not in ("rng", "out", "worker")
        ):
            text = getattr(function, "__name__", role)  # "<lambda>" for a lambda
            called = text if text.isidentifier() else role
            return f"Write functools.partial({called}, {name}={shown}) to pass it to your function."
    return ""


def _shown_value(value: object) -> str:
    """Return a short value as code, otherwise "..."."""
    shown = brief(value)
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return shown if is_plain and len(shown) <= 40 else "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar, ignoring case.

    If none is similar, return the first known name that is the last word of `name`, or "".
    """
    import difflib  # imported here, because only errors need it

    lower, by_lower = name.lower(), {each.lower(): each for each in known}
    found = difflib.get_close_matches(lower, by_lower, 1, _SIMILAR)
    found += [each for each in by_lower if lower.endswith(f"_{each}")]
    return by_lower[found[0]] if found else ""


def no_attribute(owner: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a name that `owner` does not have, with a hint if one is known."""
    hint = ATTRIBUTES.get(name, "")
    if not hint and (near := nearest(name, known)):
        hint = f"Did you mean {near}?"
    return f"{owner} has no attribute {brief(name)}{'. ' * bool(hint)}{hint}"


class NotSupportedError(TypeError, AttributeError):
    """Raised by an `Unsupported` method."""


class Unsupported:
    """Special method that a class does not have. Its use raises an error with a hint.

    `hasattr` is False. Only `isinstance(obj, Iterator)` is still True for a class with `__next__`.
    """

    def __init__(self, message: str) -> None:
        self._message = message

    def __set_name__(self, owner: type, name: str) -> None:
        self._message = f"{self._message}. {ATTRIBUTES[name]}"

    def __get__(self, instance: object, owner: type) -> object:
        raise NotSupportedError(self._message)
