"""A dispatcher whose hosts are objects of its own process: all of a cluster but the cluster.

`Pool(_program=local_hosts(hosts=2, workers=2))` starts it; SIGUSR1 has it lose a host.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any

from loaderpool.ray.dispatcher import Dispatcher
from loaderpool.ray.host import Host
from loaderpool.ray.host_messages import Message, News
from loaderpool.supervisor.main_loop import begin
from loaderpool.trainer.session.launch import Program
from loaderpool.trainer.session.running_workers import HostPlace

__all__ = ["LocalHosts", "local_hosts", "main"]


def local_hosts(
    hosts: int,
    workers: int,
    timeout_s: float = 15.0,
    note: str = "",
    late: int = 0,
    born: bool = True,
    warns: str = "",
    lost_calls: float = 0.0,
    lost: str = "",
    staged_after_s: float = 0.0,
) -> Program:
    """A program with so many hosts of so many workers; their supervisors' pids are appended to a file.

    Args:
        hosts: how many; 0: as many as the pool shall have workers.
        workers: of each.
        timeout_s: without a word, after which a host is given up.
        note: that file; none where it is empty.
        late: so many of them start, and are never there.
        born: whether any is; else each is lost as it starts.
        warns: what the user is warned of at once; nothing where it is empty.
        staged_after_s: a payload is under way for so long.
        lost_calls: this part of the calls of a host, or their answers, are lost on their way, and made again.
        lost: why no dispatcher behind the first one has a cluster.
    """
    settings = {
        "hosts": hosts,
        "workers_of_host": workers,
        "timeout_s": timeout_s,
        "note": note,
        "late": late,
        "born": born,
        "warns": warns,
        "lost_calls": lost_calls,
        "lost": lost,
        "staged_after_s": staged_after_s,
    }
    return Program("tests.support.local_hosts", "loaderpool-dispatcher", settings)


class LocalHosts:
    """Hosts on threads."""

    def __init__(self, start: dict[str, Any], tell: Any) -> None:
        self._start, self._tell = start, tell
        self._late = start["late"]
        self._hosts: dict[int, Host] = {}
        if start["lost"] and start["first_ticket"] != 1:
            tell(News(0, "over", start["lost"]))
            return
        if start["warns"]:
            tell(News(0, "warning", start["warns"]))
        self._draw = random.Random(1)
        tell(News(0, "hosts", start["hosts"] or start["workers"]))

    def lose_one(self, *_: Any) -> None:
        """Lose the oldest host, as if its node had gone; a handler of SIGUSR1."""
        lost = min(self._hosts, default=None)
        if lost is not None:
            self._tell(News(lost, "lost", "a test has ended it"))

    def want(self, hosts: int) -> None:
        self._tell(News(0, "hosts", hosts))

    def start(self, host: int) -> None:
        if self._late:
            self._late -= 1
            return
        if not self._start["born"]:
            self._tell(News(host, "placed", HostPlace("node", f"10.0.0.{host + 1}", 0)))
            self._tell(News(host, "lost", "its environment could not be set up."))
            return
        threading.Thread(target=self._begin, args=(host,), daemon=True).start()

    def _begin(self, host: int) -> None:
        patience_s, node = self._start["timeout_s"] / 3, f"10.0.0.{host + 1}"
        self._hosts[host] = made = Host(self._start["workers_of_host"], (20, 60.0), patience_s, node)
        if self._start["note"]:
            with open(self._start["note"], "a") as file:
                file.write(f"{made._session._supervisor.pid}\n")
        place = HostPlace(f"node {host}", node, self._start["workers_of_host"])
        self._tell(News(host, "started", place))

    def stage(self, host: int, key: int, nbytes: int, pieces: Iterable[tuple[int, Any]]) -> None:
        threading.Thread(target=self._stage, args=(host, key, nbytes, pieces), daemon=True).start()

    def _stage(self, host: int, key: int, nbytes: int, pieces: Iterable[tuple[int, Any]]) -> None:
        time.sleep(self._start["staged_after_s"])
        for at, content in pieces:
            for _ in range(1 + self._is_lost()):
                self._hosts[host].stage(key, nbytes, at, content)

    def exchange(self, host: int, number: int, commands: list[Message], unanswered: list[int]) -> None:
        threading.Thread(target=self._call, args=(host, number, commands, unanswered), daemon=True).start()

    def _call(self, host: int, *exchange: Any) -> None:
        try:
            while self._is_lost():  # not sent at all, or the answers are lost, or it was cut off while it waits there
                time.sleep(self._draw.random() * 0.05)
                how = self._draw.randrange(3)
                if how == 1:
                    self._hosts[host].exchange(*exchange)
                elif how == 2:
                    threading.Thread(target=self._hosts[host].exchange, args=exchange, daemon=True).start()
            self._tell(News(host, "answered", (exchange[0], self._hosts[host].exchange(*exchange))))
        except BaseException:
            self._tell(News(host, "lost", traceback.format_exc().splitlines()[-1]))

    def _is_lost(self) -> bool:
        return bool(self._draw.random() < self._start["lost_calls"])

    def end(self, host: int, is_silent: bool = False) -> None:
        made = self._hosts.pop(host, None)
        if made is not None:
            threading.Thread(target=made.close, daemon=True).start()

    def close(self) -> None:
        for host in list(self._hosts.values()):
            host.close()


def main(start: dict[str, Any]) -> None:
    """Run in a process of its own, with the settings of its start."""
    if not begin("dispatcher", start):
        return
    dispatcher = Dispatcher(start, start["timeout_s"])
    hosts = LocalHosts(start, dispatcher.tell)
    signal.signal(signal.SIGUSR1, hosts.lose_one)
    dispatcher.run(hosts)
    os._exit(0)
