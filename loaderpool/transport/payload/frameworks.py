"""Whether importing a module brings in TensorFlow or Keras, told from what is already imported in this process."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from loaderpool.system.installed import is_installed

# Top-level packages whose import imports TensorFlow or Keras. One that is missing here costs the supervisor an import
# of TensorFlow (2 s, 490 MB); one too many only makes functions of modules that use it travel by value.
FRAMEWORKS = frozenset(
    {
        "keras", "keras_cv", "keras_hub", "keras_nlp", "keras_tuner", "tensorflow", "tensorflow_addons",
        "tensorflow_hub", "tensorflow_io", "tensorflow_probability", "tensorflow_text", "tf_keras",
    }
)  # fmt: skip

# TensorFlow is built on NumPy, and the others import no framework on import: searching them would only cost time.
_NEVER_IMPORTS_ONE = frozenset({"__main__", "cloudpickle", "loaderpool", "numpy"})


def is_framework(module_name: object) -> bool:
    """Whether the module is TensorFlow, Keras, or a package that always imports one of them."""
    return isinstance(module_name, str) and module_name.partition(".")[0] in FRAMEWORKS


def is_framework_loaded() -> bool:
    """Whether this process has imported a framework; if not, no module of the user's can need one on import."""
    return any(name in sys.modules for name in FRAMEWORKS)


def home_of(value: Any) -> str:
    """Return the name of the module that must be imported to have `value`; runs no code of the value's."""
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        # Not getattr: it makes a lazy module, such as `from tensorflow import keras`, load.
        attributes = object.__getattribute__(value, "__dict__")
        name = kind.__module__ if is_framework(kind.__module__) else attributes.get("__name__")
    elif issubclass(kind, (type, types.FunctionType, types.BuiltinFunctionType)):
        name = getattr(value, "__module__", None)
    else:
        name = kind.__module__
    return name if isinstance(name, str) else ""


class FrameworkImports:
    """The answer for each module, found once. Modules may import more later, so it is made again for each use."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}

    def of(self, module_name: str) -> bool:
        """Whether the module, or one of the user's modules that it imports, has a framework among its globals."""
        if module_name not in self._known:
            self._known[module_name] = _search(module_name)
        return self._known[module_name]


def _search(root: str) -> bool:
    package = root.partition(".")[0]
    if not _is_followed(root, package):
        return False
    seen = {root}
    waiting = [root]
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if not isinstance(module, types.ModuleType):
            continue
        for home in {name.rpartition(".")[0], *_homes_of_globals(name, module)}:  # importing a.b imports a
            if is_framework(home):
                return True
            if home not in seen and _is_followed(home, package):
                seen.add(home)
                waiting.append(home)
    return False


def _is_followed(name: str, package: str) -> bool:
    """The user's own modules are searched; of installed packages only the one that the search began in."""
    top = name.partition(".")[0]
    if not top or top in sys.stdlib_module_names or top in _NEVER_IMPORTS_ONE:
        return False
    return top == package or not is_installed(name)


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
