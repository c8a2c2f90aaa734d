"""Fixtures for what returns slots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.return_pipe import Pipe


@pytest.fixture
def ends() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()
