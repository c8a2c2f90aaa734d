"""Rewriting of py-spy's files: each stack begins with the user's function.

The frames of loaderpool above it are removed. Stacks without the user's code, such as those of
loaderpool's own work, stay whole.
"""

from __future__ import annotations

import bisect
import collections
import html
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# Packages that call our code or that our code calls. None of their frames begins a user's stack.
_NOT_USERS = {
    "loaderpool",
    *sys.stdlib_module_names,
    "cloudpickle",
    "fsspec",
    "h5py",
    "multiprocess",
    "numpy",
    "pyarrow",
}
_PROCESS = re.compile(r"process (\d+):", re.DOTALL)
# Matches frames of code. Flame graphs also contain lines of a process's command.
_IS_CODE = re.compile(r"(?!process \d+:).* \(.+\)$")
# Role of a process, by its depth in the process tree.
_ROLES = ("main process", "supervisor", "worker")
_FRAME = re.compile(
    r"<g><title>(?P<name>[^<]*) \([\d,]+ samples, [^<]*</title><rect [^>]*y=\"(?P<y>\d+)\"[^>]*"
    r"fill=\"(?P<fill>[^\"]*)\" fg:x=\"(?P<x>\d+)\" fg:w=\"(?P<w>\d+)\"/><text[^<]*</text></g>"
)
_LEVEL = 16  # pixels from a frame to the one below
_CHARACTERS = 1180 / 7  # characters of text in the whole width


def rewrite(path: Path, title: str) -> None:
    """Rewrite a file of `py-spy record`. Files of unknown form are not changed."""
    text = path.read_text(encoding="utf-8")
    forms: dict[str, Callable[[str, str], str]] = {
        ".txt": _raw,
        ".json": _speedscope,
        ".svg": _flame_graph,
    }
    path.write_text(forms[path.suffix](text, title), encoding="utf-8")


def shown(frames: list[str]) -> list[str]:
    """Return the frames of a stack that are shown, the outermost first.

    A frame is `name (file:line)`. The first one names the process.
    """
    processes = [found[1] for found in map(_PROCESS.match, frames) if found]
    code = [*filter(_IS_CODE.match, frames)]
    first = next((at for at, frame in enumerate(code) if _is_users(frame)), 0)
    if not processes:
        return code[first:]
    role = _ROLES[len(processes) - 1] if len(processes) <= len(_ROLES) else "started by a worker"
    return [f"process {processes[-1]}: {role}", *code[first:]]


def _is_users(frame: str) -> bool:
    file = frame.rpartition(" (")[2]
    return (
        not file.startswith(("<frozen", "<string>"))
        and re.split(r"[/.:)]", file)[0] not in _NOT_USERS
    )


def _raw(text: str, _: str) -> str:
    """Rewrite lines of `frame;frame;frame count`. Names of processes may contain line breaks."""
    counts = collections.Counter[str]()
    for stack, count in re.findall(r"(process \d+:.*?) (\d+)\n(?=process|\Z)", text, re.DOTALL):
        counts[";".join(shown(stack.split(";")))] += int(count)
    return "".join(f"{stack} {count}\n" for stack, count in counts.items()) or text


def _speedscope(text: str, _: str) -> str:
    content = json.loads(text)
    names = [
        f"{frame['name']} ({frame['file']}:{frame['line']})"
        for frame in content["shared"]["frames"]
    ]
    for profile in content["profiles"]:
        stacks = profile["samples"]
        profile["samples"] = [
            stack[-len(shown([names[at] for at in stack])) :] if stack else stack
            for stack in stacks
        ]
    return json.dumps(content)


class _Drawn(NamedTuple):
    y: int
    x: int  # number of samples, as in `w`
    w: int
    name: str
    fill: str


def _flame_graph(text: str, title: str) -> str:
    """Redraw the frames. The rest of py-spy's file stays, such as its script for zooming."""
    drawn = sorted(
        _Drawn(
            int(each["y"]),
            int(each["x"]),
            int(each["w"]),
            html.unescape(each["name"]),
            each["fill"],
        )
        for each in _FRAME.finditer(text)
    )
    if not drawn or text.count("<g><title>") != len(drawn):
        return text
    top, bottom, fills = drawn[0].y, drawn[-1].y, {each.name: each.fill for each in drawn}
    tree = _Node()
    for frames, count in _stacks(drawn):
        tree.add([drawn[0].name, *shown(frames)], count)
    head, _, body = text.partition("<g><title>")
    lines = list(_draw(tree, 0, top, tree.count, lambda name: fills.get(name, "rgb(224,160,64)")))
    height = int(re.findall(r'<svg version="1.1" width="\d+" height="(\d+)"', head)[0])
    new = height + (tree.depth - 1) * _LEVEL - (bottom - top)
    head = head.replace(f'height="{height}"', f'height="{new}"').replace(f' {height}"', f' {new}"')
    head = head.replace(f'y="{height - 11}.00"', f'y="{new - 11}.00"')
    head = re.sub(
        r'(<text id="title"[^>]*>)[^<]*', lambda found: found[1] + html.escape(title), head
    )
    return head + "".join(lines) + body[body.rindex("</g>") + len("</g>") :]


def _stacks(drawn: list[_Drawn]) -> Iterator[tuple[list[str], int]]:
    """Yield each stack without its root, and the number of samples that ended there."""
    levels: dict[int, list[_Drawn]] = collections.defaultdict(list)
    for each in drawn:
        levels[each.y].append(each)
    inner = collections.Counter[_Drawn]()
    stacks: dict[_Drawn, list[str]] = {drawn[0]: []}
    for each in drawn[1:]:
        above = levels[each.y - _LEVEL]
        parent = above[bisect.bisect_right(above, each.x, key=lambda frame: frame.x) - 1]
        inner[parent] += each.w
        stacks[each] = [*stacks[parent], each.name]
    for each, frames in stacks.items():
        if own := each.w - inner[each]:
            yield frames, own


class _Node:
    """A frame and the frames that it called."""

    def __init__(self) -> None:
        self.count, self.inner = 0, dict[str, _Node]()

    def add(self, frames: list[str], count: int) -> None:
        node = self
        for name in frames:
            node.count += count
            node = node.inner.setdefault(name, _Node())
        node.count += count

    @property
    def depth(self) -> int:
        """The number of levels below this frame."""
        return max((1 + node.depth for node in self.inner.values()), default=0)


def _draw(node: _Node, x: int, y: int, whole: int, fill_of: Callable[[str], str]) -> Iterator[str]:
    for name, inner in sorted(node.inner.items()):
        share, text = 100 * inner.count / whole, html.escape(name)
        room = int(_CHARACTERS * share / 100)
        fits = (
            text if len(name) <= room else html.escape(f"{name[: room - 2]}..") if room > 4 else ""
        )
        place = f'x="{100 * x / whole:.4f}%" y="{y}" width="{share:.4f}%" height="{_LEVEL - 1}"'
        yield (
            f"<g><title>{text} ({inner.count:,} samples, {share:.2f}%)</title>"
            f'<rect {place} fill="{fill_of(name)}" fg:x="{x}" fg:w="{inner.count}"/>'
            f'<text x="{100 * x / whole + 0.25:.4f}%" y="{y + 10}.50">{fits}</text></g>'
        )
        yield from _draw(inner, x, y + _LEVEL, whole, fill_of)
        x += inner.count
