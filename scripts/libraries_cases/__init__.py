"""The rows of docs/guide/libraries.md: each is a case that `scripts/libraries` runs.

Open first: `case.py`, which says what a case is. `trial.py` runs one case in a process of its own,
`page.py` writes the page's tables, and `__main__.py` is the command. All others are cases.
"""
