"""What is said of a host where one of Ray's exceptions came."""

from __future__ import annotations

import pytest

from loaderpool.ray.loss_words import could_not_begin, why_lost

DIED = "The actor died unexpectedly before finishing this task.\n\tclass_name: HostActor\n\tactor_id: 8f\n\tpid: 812\n"
CRASHED = (
    f"{DIED}The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
    "Worker unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) "
    "The process is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called."
)
MEMORY = (
    f"{DIED}The actor is dead because its worker process has died. Worker exit type: NODE_OUT_OF_MEMORY Worker exit "
    "detail: Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.7) was 15.2GB"
)
BEGAN = (
    "The actor died because of an error raised in its creation task, ray::HostActor.__init__()\nOSError: no space left"
)


class ActorDiedError(Exception):
    """As Ray's."""

    actor_init_failed = False


class RuntimeEnvSetupError(Exception):
    """As Ray's."""


class RayTaskError(Exception):
    """As Ray's."""


class ActorUnavailableError(Exception):
    """As Ray's."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ActorDiedError(MEMORY), "Ray's memory monitor ended it, as memory ran out on its node: "),
        (
            ActorDiedError(CRASHED),
            "its process was killed or has crashed, as by the kernel for lack of memory (Worker unexpectedly exits ",
        ),
        (ActorDiedError(f"{DIED}The actor died because its node has died. Node Id: 5d"), "its node has died"),
        (
            RuntimeEnvSetupError("Failed to set up runtime environment.\nno package of\nthis name"),
            "its environment could not be set up (runtime_env=): no package of this name",
        ),
        (
            ActorUnavailableError("The actor 8f is unavailable: a socket"),
            "it cannot be reached (The actor 8f is unavail",
        ),
        (
            RayTaskError("ray::HostActor.stage() (pid=8)\n  File ...\nloaderpool.errors.MemoryLimitError: no room"),
            "it failed: loaderpool.errors.MemoryLimitError: no room",
        ),
        (ValueError("x" * 1000), f"ValueError: {'x' * 600} ..."),
    ],
)
def test_it_is_said_in_plain_words(error: Exception, said: str) -> None:
    assert why_lost(error).startswith(said)


def test_what_a_host_raises_as_it_begins_is_told() -> None:
    error = ActorDiedError(BEGAN)
    error.actor_init_failed = True
    assert why_lost(error) == "it could not begin: OSError: no space left"
    assert could_not_begin(error) and could_not_begin(RuntimeEnvSetupError())
    assert not could_not_begin(ActorDiedError(CRASHED))
