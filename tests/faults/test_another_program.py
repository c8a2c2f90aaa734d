"""A pool with another program in the supervisor's place: started, started again where it died, and ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import loaderpool as lp
from loaderpool.core.launch import Program


def test_a_pool_runs_the_program_that_it_is_given(tmp_path: Path) -> None:
    note = tmp_path / "note"
    program = Program("tests.support.another_program", "another-program", {"note": str(note)})
    with lp.Pool(2, _program=program) as pool:
        with lp.Loader(range(600), lambda item: item, batch_size=2, workers=pool) as loader:
            batches = iter(loader)
            taken = [next(batches).tolist() for _ in range(3)]
            pid, workers = map(int, note.read_text().split())
            assert workers == 2
            command = Path(f"/proc/{pid}/cmdline").read_text()
            assert "tests.support.another_program" in command and command.endswith("another-program\0")
            os.kill(pid, signal.SIGKILL)
            taken += [batch.tolist() for batch in batches]
            del batches
            assert taken == [[n, n + 1] for n in range(0, 600, 2)]
            assert sum(1 for _ in loader) == 300
        pids = [int(line.split()[0]) for line in note.read_text().splitlines()]
        assert len(pids) == 2 and pids[0] == pid
