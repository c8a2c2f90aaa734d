"""Which frameworks importing a module brings in, told from what is already imported in this process."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from loaderpool.system.installed import is_installed, requirements_of

# The framework that each of these packages is, or always imports. One that is missing here, and does not say that it
# requires one, costs the supervisor an import (TensorFlow: 2 s, 490 MB; torch: 1 to 4 s, 230 MB; JAX: 0.5 s); one too
# many only makes functions of modules that use it travel by value.
FRAMEWORKS: Mapping[str, str] = {
    **dict.fromkeys(
        ("keras", "keras_cv", "keras_hub", "keras_nlp", "keras_tuner", "tensorflow", "tensorflow_addons",
         "tensorflow_hub", "tensorflow_io", "tensorflow_probability", "tensorflow_text", "tf_keras"),
        "TensorFlow",
    ),
    "jax": "JAX",
    "jaxlib": "JAX",
    "torch": "torch",
}  # fmt: skip

# The frameworks are built on NumPy, and the others import none on import: searching them would only cost time.
_NEVER_IMPORTS_ONE = frozenset({"__main__", "cloudpickle", "loaderpool", "ml_dtypes", "numpy", "scipy"})


def framework_of(module_name: object) -> str:
    """Return the framework that a module is part of, or that its package always imports: "TensorFlow", say, or ""."""
    return FRAMEWORKS.get(module_name.partition(".")[0], "") if isinstance(module_name, str) else ""


def loaded_frameworks() -> frozenset[str]:
    """Return the frameworks that this process has imported; no module of the user's can need another on import."""
    return frozenset(framework for name, framework in FRAMEWORKS.items() if name in sys.modules)


def home_of(value: Any) -> str:
    """Return the name of the module that must be imported to have `value`; runs no code of the value's."""
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        # Not getattr: it makes a lazy module, such as `from tensorflow import keras`, load.
        attributes = object.__getattribute__(value, "__dict__")
        name = kind.__module__ if framework_of(kind.__module__) else attributes.get("__name__")
    elif issubclass(kind, (type, types.FunctionType, types.BuiltinFunctionType)):
        name = getattr(value, "__module__", None)
    else:
        name = kind.__module__
    return name if isinstance(name, str) else ""


class FrameworkImports:
    """The answer for each module, found once. Modules may import more later, so it is made again for each use.

    Args:
        frameworks: those that are looked for.
    """

    def __init__(self, frameworks: AbstractSet[str]) -> None:
        self._frameworks, self._known = frameworks, dict[str, bool]()

    def of(self, module_name: str) -> bool:
        """Whether the module, or one of the user's modules that it imports, has such a framework among its globals.

        Or anything of an installed package that requires one, wherever it is installed.
        """
        if module_name not in self._known:
            self._known[module_name] = self._search(module_name)
        return self._known[module_name]

    def _search(self, root: str) -> bool:
        package = root.partition(".")[0]
        if framework_of(root) or not _is_followed(root, package):
            return framework_of(root) in self._frameworks
        seen = {root}
        waiting = [root]
        while waiting:
            name = waiting.pop()
            module = sys.modules.get(name)
            if not isinstance(module, types.ModuleType):
                continue
            for home in {name.rpartition(".")[0], *_homes_of_globals(name, module)}:  # importing a.b imports a
                if home in seen:
                    continue
                seen.add(home)
                if framework_of(home) in self._frameworks or self._is_required_by(home, package):
                    return True
                if _is_followed(home, package):
                    waiting.append(home)
        return False

    def _is_required_by(self, home: str, package: str) -> bool:
        """Whether a module is of an installed package, other than this one, that requires one of the frameworks."""
        top = home.partition(".")[0]
        if top == package or _is_never(top) or not is_installed(home):
            return False
        return any(framework_of(name) in self._frameworks for name in requirements_of(top))


def _is_followed(name: str, package: str) -> bool:
    """The user's own modules are searched; of installed packages only the one that the search began in."""
    top = name.partition(".")[0]
    return not _is_never(top) and (top == package or not is_installed(name))


def _is_never(top: str) -> bool:
    return not top or top in sys.stdlib_module_names or top in _NEVER_IMPORTS_ONE


def _homes_of_globals(name: str, module: types.ModuleType) -> Iterator[str]:
    for key, value in list(vars(module).items()):
        home = home_of(value)
        if home == f"{name}.{key}" and isinstance(value, types.ModuleType) and not _imports_submodule(module, key):
            continue
        yield home


def _imports_submodule(package: types.ModuleType, key: str) -> bool:
    """Whether the package's own code imports its submodule `key`.

    Python sets a submodule as an attribute of its package, whatever code imported it. Without this distinction, an
    empty `project/__init__.py` would seem to import TensorFlow as soon as the script has imported `project.model`.
    """
    try:
        spec = package.__spec__
        names = spec.loader.get_code(spec.name).co_names  # type: ignore[union-attr]  # either may be missing: below
    except Exception:
        return True  # no code to look at; by value is never wrong, and the other answer could import TensorFlow
    wanted = (key, f"{package.__name__}.{key}")
    return any(name == each or name.startswith(f"{each}.") for name in names for each in wanted)
