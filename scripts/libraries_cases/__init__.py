"""The rows of docs/guide/libraries.md. Each row is a case that `scripts/libraries` runs.

Open first: `case.py`, which explains a case. `trial.py` runs one case in a process of its own,
`page.py` writes the page's tables, and `__main__.py` is the command. All other modules contain
cases.
"""
