"""The dispatcher's process, from its first import to its end."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from loaderpool.ray.cluster_nodes import ClusterSettings
from loaderpool.ray.dispatcher import Dispatcher
from loaderpool.ray.ray_hosts import RayHosts
from loaderpool.supervisor.program import begin, end_group
from loaderpool.system import machine


def main(start: Mapping[str, Any]) -> None:
    """Run a dispatcher with the settings of its start."""
    if not begin("dispatcher", start):
        return
    settings = ClusterSettings(**start["cluster"])
    try:
        dispatcher = Dispatcher(start, settings.host_timeout_s, start["hands_over"])
        dispatcher.run(RayHosts(settings, dispatcher.tell, start["first_ticket"] == 1))
    except ProcessLookupError:
        pass  # the trainer died just now
    except BaseException:
        traceback.print_exc()
    finally:
        machine.flush_standard_streams()
        end_group()
