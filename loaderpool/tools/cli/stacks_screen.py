"""What `loaderpool top` shows of workers' stacks: where threads are, those at one place together."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from rich.text import Text

from loaderpool.system.readable import counted
from loaderpool.tools.watching.worker_stacks import Frame, Place

_SHOWN_WORKERS = 12


def draw_stacks(found: Sequence[Place], silent: int, width: int, height: int | None) -> Text:
    """Return the screen.

    Args:
        found: where threads are.
        silent: how many workers have not answered.
        width: of the terminal, in characters.
        height: in lines; None: there is no end of them.
    """
    frames = sum(len(place.frames) for place in found) if height is None else _room(len(found), height)
    lines = [line for place in found for line in _place(place, frames, width)]
    if silent:
        lines.append(Text(f"{counted(silent, 'worker')} did not answer"))
    if not lines:
        lines.append(Text("No worker of this machine makes batches for it now."))
    if height is not None and len(lines) > height:
        hidden = len(lines) - height + 1
        lines[height - 1 :] = [Text(f"… {counted(hidden, 'line')} more, for which the terminal is not high enough")]
    for line in lines:
        if not line.plain.isprintable():  # names of functions and files may be anything
            line.plain = "".join(each if each.isprintable() else "?" for each in line.plain)
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, end="").join(lines)


def _room(places: int, height: int) -> int:
    """Return how many frames of each place there is room for."""
    return max(1, height // max(1, places) - 2)


def _place(place: Place, most: int, width: int) -> Iterator[Text]:
    counts = collections.Counter(place.pids)
    named = [f"{pid}" if count == 1 else f"{pid} ({count} threads)" for pid, count in counts.items()]
    more = f" and {len(named) - _SHOWN_WORKERS} more" if len(named) > _SHOWN_WORKERS else ""
    # On a narrow terminal their end is cut off: how many they are, and where, stands first.
    where = "" if place.frames else " in loaderpool itself, mostly waiting for work"
    who = Text(f"{counted(len(named), 'worker')}{where}", style="bold")
    yield who.append(f": pid {', '.join(named[:_SHOWN_WORKERS])}{more}", style="not bold")
    if not place.frames:
        return
    shown = place.frames[:most]
    longest = min(width // 2, max(len(frame.function) for frame in shown))
    yield from (_frame(frame, longest, width) for frame in shown)
    if len(place.frames) > most:
        yield Text(f"  … {len(place.frames) - most} more, which called these", style="dim")


def _frame(frame: Frame, longest: int, width: int) -> Text:
    function = f"  {frame.function.ljust(longest)}  "
    where, room = f"{frame.file}:{frame.line}", width - len(function)
    if len(where) > room > 0:  # its end is what tells most
        where = f"…{where[len(where) - room + 1 :]}"
    return Text.assemble(function, (where, "dim"))
