"""What Ray's exceptions mean for a host, in words for people."""

from __future__ import annotations

# More of a text of Ray's than this is not shown: its logs have the rest.
_MOST_CHARACTERS = 600
_OUT_OF_MEMORY = (
    "Ray's memory monitor ended it, as memory ran out on its node: have fewer workers on each host "
    "(workers_per_host=), lower batch_size, or tell Ray what a host takes (memory_per_host=)"
)


def why_lost(error: BaseException) -> str:
    """Return why a host is lost of which a call has ended so."""
    name, text = type(error).__name__, str(error).strip()
    if name == "OutOfMemoryError" or "NODE_OUT_OF_MEMORY" in text or "running low on memory" in text:
        return _OUT_OF_MEMORY
    if name == "RuntimeEnvSetupError":
        return f"its environment could not be set up (runtime_env=): {_short(text.partition(chr(10))[2] or text)}"
    if getattr(error, "actor_init_failed", False):
        return f"it could not begin: {_short(text.splitlines()[-1])}"
    if "node has died" in text or "node has been" in text or name == "NodeDiedError":
        return "its node has died"
    if "Worker exit type" in text:
        detail = text.partition("Worker exit detail:")[2].partition("There are some potential root causes")[0]
        return f"its process was killed or has crashed, as by the kernel for lack of memory ({_short(detail)})"
    if name.startswith("RayTaskError"):  # with the traceback of the actor, whose last line says what it was
        return f"it failed: {_short(text.splitlines()[-1])}"
    if name == "ActorUnavailableError":
        return f"it cannot be reached ({_short(text)})"
    return f"{name}: {_short(text)}"


def could_not_begin(error: BaseException) -> bool:
    """Whether it ended so before it did anything, for a reason that another host of this kind would have as well."""
    return type(error).__name__ == "RuntimeEnvSetupError" or bool(getattr(error, "actor_init_failed", False))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."
