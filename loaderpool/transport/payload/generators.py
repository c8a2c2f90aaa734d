"""Random generators in a loader's functions and objects, and the key that each is seeded by.

The pickler finds generators that are pickled. A search finds those in modules that workers import,
and those that objects create again when they are unpickled. The search runs in the main process and
where the payload is loaded. With `workers=0` it finds all generators.

Runs in: the main process (`Registry`), the processes that load a payload (`arrive`).
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from loaderpool.config import LoaderConfig
from loaderpool.plan.generators import (
    KEY_BYTES,
    MOST_GENERATORS,
    CapturedGenerators,
    is_generator,
    key_of,
    number_of_global,
    seed_of,
)
from loaderpool.system.hashes import blake2b
from loaderpool.system.interrupts import FailuresIgnored
from loaderpool.system.process import is_library
from loaderpool.system.walk import walk
from loaderpool.transport.payload.generator_search import Search, module_of
from loaderpool.transport.payload.record import Pair, WorkerPayload

# Values that a search enters, if a pickler finds the pickled generators. Smaller: in large
# payloads, generators that objects create again are not found. Larger: a loader is created more
# slowly.
_MOST_ENTERED = 20_000
# Values that a search enters with `workers=0`. Smaller: payloads are searched only in part. Larger:
# each loader takes a second or more.
MOST_ENTERED_HERE = 1_000_000
# Values that a search enters at the start of an epoch, and items of each list. Smaller: fewer
# new generators are found. Larger: the search takes more than 1 or 2 ms.
_MOST_AGAIN, _MOST_ITEMS_AGAIN = 1_000, 50


class Travelling(NamedTuple):
    """Generators of one pickle."""

    pairs: list[Pair]  # generators in it, with their keys
    others: dict[str, bytes]  # keys of generators that are not pickled, by path
    keys: tuple[bytes, ...]  # keys of all generators that may change in the next epoch


class Registry:
    """The generators of one loader. Each keeps the key of its state when it was first seen.

    Runs in: the main process. The key stays while the generator is used, even after draws.

    Args:
        roots: the functions, the source and the hook, by name.
        most_entered: maximum number of values whose contents are searched.
    """

    def __init__(self, roots: Mapping[str, object], most_entered: int = _MOST_ENTERED) -> None:
        self._roots = roots
        # pairs by id; they keep the generators alive, but not the owners
        self._known: dict[int, Pair] = {}
        # by id: the key before a saved state was loaded, and the seed
        self._own: dict[int, tuple[bytes, str]] = {}
        # pickled generators, by the names of the payload's parts in that pickle
        self._travelled: dict[frozenset[str], list[object]] = {}
        self._most_entered = most_entered
        self._found: dict[str, object] = {}  # generators that the search has found, by path
        self._search()

    def _search(self) -> None:
        search = Search(self._roots, self._most_entered)
        self._found, self._entered, self.is_complete = (
            search.found,
            search.entered,
            search.is_complete,
        )
        self._look_up(self._found.values())
        self._forget()

    def _search_again(self) -> None:
        if self._entered <= _MOST_AGAIN:
            self._search()
            return
        found = Search(self._roots, _MOST_AGAIN, _MOST_ITEMS_AGAIN).found
        self._look_up(found.values())
        self._found.update(found)
        self._forget()

    def _look_up(self, generators: Iterable[object]) -> None:
        """Give new generators the keys of their present states."""
        for generator in generators:
            if id(generator) not in self._known:
                self._add(generator, key_of(generator))

    def _add(self, generator: object, key: bytes) -> None:
        self._known[id(generator)] = generator, key
        self._own[id(generator)] = key, seed_of(generator)

    def _forget(self) -> None:
        """Forget generators that are not used any more."""
        used = [
            *self._found.values(),
            *(each for several in self._travelled.values() for each in several),
        ]
        self._known = {id(generator): self._known[id(generator)] for generator in used}
        self._own = {number: self._own[number] for number in self._known}

    def look_again(self, made: Iterable[Pair] = ()) -> bool:
        """Search for new generators. Return True if any were added or removed.

        Args:
            made: generators that the `setup` hook has made in this process.
        """
        before = self.pairs
        for generator, key in made:
            self._add(generator, key)
        self._search_again()
        return [*map(id, before)] != [*map(id, self.pairs)]

    def travel(self, names: frozenset[str], generators: list[object]) -> Travelling:
        """Note the generators in a pickle, and return their keys.

        Args:
            names: names of the payload's parts in the pickle, the same in each epoch.
            generators: in the order in which the pickler found them.
        """
        before = {id(generator): generator for generator in self._travelled.get(names, ())}
        is_first = names not in self._travelled
        self._travelled[names] = generators
        self._look_up(generators)
        now = set(map(id, generators))
        gone = before.keys() - now
        self._found = {path: each for path, each in self._found.items() if id(each) not in gone}
        if not is_first and (now != before.keys() or self._made_on_loading()):
            self._search_again()
        pairs = [self._known[id(generator)] for generator in generators]
        others = {path: self._known[id(generator)][1] for path, generator in self._found.items()}
        # With a stream, its items and the functions are in separate pickles.
        made = [
            path
            for path in self._made_on_loading()
            if "fn" in names or path.partition("/")[0] in names
        ]
        keys = *(key for _, key in pairs), *(others[path] for path in sorted(made))
        return Travelling(
            pairs, others if made or any(map(module_of, self._untravelled())) else {}, keys
        )

    def _untravelled(self) -> list[str]:
        travelled = {id(each) for several in self._travelled.values() for each in several}
        return [path for path, generator in self._found.items() if id(generator) not in travelled]

    def _made_on_loading(self) -> list[str]:
        return [path for path in self._untravelled() if not module_of(path)]

    @property
    def pairs(self) -> list[Pair]:
        """Generators of this process, with their keys."""
        return list(self._known.values())

    def adopt(self, saved: Sequence[Sequence[str]]) -> bool:
        """Use the keys of a saved state. Return True if any key changed.

        A generator without a seed has a different state in each process. With the key of the first
        process, a resumed training draws the same numbers. A generator with a different seed keeps
        its own key. A generator whose own key is in the saved state keeps it, too.
        """
        known = {path: (bytes.fromhex(key), seed) for path, key, seed in saved}
        keys = {key for key, _ in known.values()}
        before = self.pairs
        for path, generator in [*self._named()]:
            own, seed = self._own[id(generator)]
            key, seed_then = known.get(path, (own, seed))
            self._known[id(generator)] = generator, own if own in keys or seed != seed_then else key
        return self.pairs != before

    def saved(self) -> list[list[str]]:
        """Return paths, keys and seeds for a saved state."""
        return [
            [path, self._known[id(generator)][1].hex(), self._own[id(generator)][1]]
            for path, generator in self._named()
        ]

    def _named(self) -> Iterator[tuple[str, object]]:
        """Yield each generator once, with its path. If the search did not find it, its number
        replaces the path.
        """
        paths = {id(generator): path for path, generator in reversed(self._found.items())}
        for number, (generator, _) in enumerate(self.pairs):
            yield paths.get(id(generator), f"#{number}"), generator

    def __len__(self) -> int:
        return len(self._known)

    def notes(self) -> tuple[str, ...]:
        """Return a note if the search stopped at its limit."""
        note = (
            f"random generators are seeded if they are among the first {self._most_entered:,} "
            "objects"
        )
        return () if self.is_complete else (f"{note} of the function and the source",)

    def names(self) -> list[str]:
        """Return the names of generators for a warning, as far as a walk finds them."""

        def enters(value: object) -> bool:
            is_code = issubclass(type(value), (type, types.FunctionType))
            return not (is_code and is_library(str(value.__module__)))

        names = dict[int, str]()
        for found in walk(self._roots, enters, most_entered=_MOST_AGAIN):
            if is_generator(found.value) and number_of_global(found.value) is None:
                names.setdefault(id(found.value), " → ".join(found.path))
        for path, generator in self._found.items():
            if module_of(path):  # a walk does not enter modules
                names.setdefault(id(generator), path.replace(":", ".", 1).replace("/", "."))
        return list(names.values())


# ---- processes that load a payload ----


def arrive(payload: WorkerPayload, travelled: Iterable[Pair], keys: Mapping[str, bytes]) -> None:
    """Set the generators of a payload that was loaded, and the keys of generators found later.

    Args:
        payload: the unpickled payload.
        travelled: generators in its pickle, with their keys.
        keys: keys of other generators that the main process has found, by path.
    """
    pairs = list(travelled)
    search = Search(payload.roots(), _MOST_ENTERED)
    payload.generators = [*pairs, *_untravelled(search, pairs, keys)]
    missing = [path for path in keys if module_of(path) and path not in search.found]
    # Code of the payload imports these modules when it runs.
    payload.imports = imports = [
        name
        for name in search.missing
        if any(f"{module_of(path)}.".startswith(f"{name}.") for path in missing)
    ]
    names = tuple(f"{name}." for name in imports)
    payload.keys = {path: keys[path] for path in missing if f"{module_of(path)}.".startswith(names)}


def made_by_setup(payload: WorkerPayload, known: Iterable[Pair]) -> Iterator[Pair]:
    """Yield the generators that are still unknown, because the `setup` hook has made them in this
    process.
    """
    return _untravelled(Search(payload.roots(), _MOST_ENTERED), known, payload.keys)


def _untravelled(
    search: Search, known: Iterable[Pair], keys: Mapping[str, bytes]
) -> Iterator[Pair]:
    """Yield the generators that were made in this process, with their keys.

    Each process makes its own, so their states are of no use for a key. The key is the one that the
    main process has for the same path. If there is none, it is derived from the path.
    """
    seen = {id(generator) for generator, _ in known}
    for path, generator in search.found.items():
        if id(generator) not in seen:
            seen.add(id(generator))
            yield (
                generator,
                keys.get(path) or blake2b(path.encode(), digest_size=KEY_BYTES).digest(),
            )


def with_imports(
    modules: Sequence[str], setup: Callable[[], object] | None
) -> Callable[[], object] | None:
    """Return a hook that first imports modules whose generators are to be seeded, and then calls
    `setup`.
    """
    return functools.partial(_set_up, modules, setup) if modules else setup


def _set_up(modules: Sequence[str], setup: Callable[[], object] | None) -> object:
    for name in modules:
        with FailuresIgnored():  # the function raises the same error if it imports the module
            importlib.import_module(name)
    return setup() if setup is not None else None


def seeder(pairs: list[Pair], config: LoaderConfig) -> CapturedGenerators | None:
    """Return an object that seeds these generators for each sample.

    None if there are no generators, if there are too many, or if concurrent calls share them.
    """
    is_wanted = config.seed_globals is not False and config.threads == 1
    if not pairs or not is_wanted or len(pairs) > MOST_GENERATORS:
        return None
    return CapturedGenerators(pairs, config.seed)
