"""python -m bench.contestant QUESTION CONTESTANT WINDOW: one run of one contestant, in this process."""

from __future__ import annotations

import importlib
import sys

from benchlib.rounds import serve

if __name__ == "__main__":
    question, contestant, window = sys.argv[1:]
    serve(importlib.import_module(f"bench.{question}").QUESTION.contestants[contestant], window)
