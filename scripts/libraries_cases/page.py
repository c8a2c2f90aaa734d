"""The tables of docs/guide/libraries.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from libraries_cases.case import TABLES, Case, pins

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "libraries.md"
BEGIN = "<!-- libraries:begin -->\n"
END = "<!-- libraries:end -->"

IN_WORKERS = {
    "works": "works",
    "without fork": "works, [without fork](#without-fork)",
    "refused": "refused",
    "fails": "fails",
    "not reproducible": "[not reproducible](#randomness)",
}


def tables(cases: Iterable[Case]) -> str:
    """Return a table for each field. Neighboring cases of a library with the same outcome are one
    row.
    """
    versions = pins()
    cases = list(cases)
    parts = []
    for key, heading in TABLES.items():
        of_table = [each for each in cases if each.table == key]
        head = [
            f"### {heading}",
            "",
            "| Library | Object | In workers | Instead |",
            "|---|---|---|---|",
        ]
        parts.append("\n".join([*head, *_rows(of_table, versions)]))
    return "\n\n".join(parts) + "\n"


def _rows(cases: Iterable[Case], versions: dict[str, str]) -> Iterator[str]:
    def row_of(case: Case) -> tuple[str, str, str, str]:
        return case.library, case.package, case.outcome.kind, case.advice

    for (library, package, kind, advice), alike in itertools.groupby(cases, row_of):
        version = versions[package] if package else "in Python"
        objects = ", ".join(case.what for case in alike)
        yield f"| {library} {version} | {objects} | {IN_WORKERS[kind]} | {advice} |"


def written_tables() -> str:
    """Return the present tables of the page."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def write_tables(text: str) -> None:
    """Replace the page's tables."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}", encoding="utf-8")
