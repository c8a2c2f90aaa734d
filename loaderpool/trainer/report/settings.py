"""A loader's settings as texts: what it was told, by names and numbers, and nothing of its data."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from loaderpool.cache.setting import as_cache
from loaderpool.config import LoaderConfig
from loaderpool.plan.base import BasePlan
from loaderpool.settings.groups import Auto

_MOST_LENGTH = 200  # of a text: a list of boundaries may have thousands


def loader_settings(arguments: Mapping[str, Any], config: LoaderConfig, plan: BasePlan) -> dict[str, str]:
    """Return each setting by the name of its argument.

    Functions and objects are told by their names and classes, a cache on disk without its directory.

    Args:
        arguments: of `Loader`, by name.
        config: what they come to.
        plan: what follows from them.
    """
    cache, workers = as_cache(arguments["cache"]), arguments["workers"]
    told: dict[str, Any] = {
        "source": _class_of(arguments["source"]),
        "items": "unknown" if plan.is_open else "endless" if plan.is_endless else f"{plan.size:,}",
        **{name: _name(arguments[name]) for name in ("fn", "batch_fn", "augment", "setup")},
        "batch_size": config.batch_size,
        "workers": workers if isinstance(workers, (int, str, Auto)) else _class_of(workers),
        "shuffle": config.shuffle_window or config.shuffle,
        "seed": config.seed,
        "drop_remainder": config.drop_remainder,
        "deterministic": config.deterministic,
        "shard": f"{config.shard.index} of {config.shard.num_shards}",
        "element_spec": arguments["element_spec"],
        "pad": config.pad,
        "ragged": config.ragged,
        "on_error": config.on_error.action,
        "error budget": config.on_error.budget,
        "buckets": None if config.buckets is None else config.buckets.boundaries,
        "bucket sizes": None if config.buckets is None else config.buckets.batch_sizes,
        "cache": None if cache is None else "in memory" if cache.in_memory else "on disk",
        "worker_options": config.worker_options,
        "limits": config.limits,
    }
    return {name: _shortened(value) for name, value in told.items() if value is not None}


def _name(function: Any) -> str | None:
    """Return what a function is called; of an object that is called, its class."""
    if function is None:
        return None
    if isinstance(function, functools.partial):
        return f"functools.partial({_name(function.func)}, ...)"
    name = getattr(function, "__qualname__", None)
    if not isinstance(name, str):
        return _class_of(function)
    module = getattr(function, "__module__", None)  # a method of C has none
    return f"{module}.{name}" if isinstance(module, str) else name


def _class_of(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MOST_LENGTH else f"{text[: _MOST_LENGTH - 2]} …"
