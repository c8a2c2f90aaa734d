"""What is sent without waiting lets go of what it owns, sent or not."""

from __future__ import annotations

import os
import select
import socket

import pytest

from loaderpool.system import machine
from loaderpool.transport.messages import Notice, encode
from loaderpool.transport.pipes import SocketOutlet, receive_notice

pytestmark = pytest.mark.no_leaks


@pytest.mark.parametrize("is_read", [True, False])
def test_a_file_is_closed_when_it_was_sent_or_cannot_be(is_read: bool) -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    files = [machine.create_memory_file("batch")]
    with mine, theirs:
        mine.setblocking(False)
        outlet = SocketOutlet(mine, select.poll())
        os.write(files[0], b"rows")
        outlet.send_file(encode(Notice.COMPLETION, 7), files[0], 4)
        if is_read:
            assert receive_notice(theirs) is not None
        while not is_read and len(outlet._unsent) < 2:
            files.append(machine.create_memory_file("batch"))
            outlet.send_file(encode(Notice.COMPLETION, 7), files[-1], 0)
        theirs.close()
        outlet.flush()
        assert outlet.is_gone is not is_read
        for file in files:
            with pytest.raises(OSError, match="descriptor"):
                os.fstat(file)
