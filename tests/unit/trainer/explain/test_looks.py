"""What two looks at a loader tell, and the page on which they travel."""

from __future__ import annotations

import json
import mmap
import os
import re

import pytest

from loaderpool.memory.call_times import BUCKETS, CallTimes, SlowCall
from loaderpool.trainer.explain.decision import Autotuned, Decision
from loaderpool.trainer.explain.looks import Look, look_from_json, look_to_json, observed_in
from loaderpool.trainer.explain.observed import Pace
from loaderpool.trainer.explain.page import LooksPage, PageContent
from tests.support.looks import ABOUT, S, look

START_NS = 3 * S


def seen(number: int, workers: int = 2, pid: int = 100) -> Look:
    """A look of second `2 * number`, with calls, of a loader whose first batch was waited for."""
    calls = CallTimes(10 * number, number * S, number * 1000, (number,) * BUCKETS, (SlowCall(7, 8, 9),))
    pids = tuple(range(pid, pid + workers))
    return look(number, pids=pids, calls=calls, end_ns=number * 2 * S, start_ns=START_NS)


def test_they_tell_what_was_between() -> None:
    found = observed_in([seen(number) for number in range(6)], ABOUT, 5.0)
    assert (found.seconds, found.steps, found.samples, found.bytes) == (4.0, 40, 1280, 1_280_000)
    assert (found.wait_s, found.wait_share, found.ready_steps, found.ready_steps_s) == (2.0, 0.5, 16, 0.8)
    assert (found.workers, found.busy_s, found.idle_s, found.cpu_s, found.queued_s) == (2, 4.0, 4.0, 2.0, 0.4)
    assert (found.calls.calls, found.calls.slowest, found.slow_s) == (20, (SlowCall(7, 8, 9),), 2e-6)
    assert (found.machine_cpu_s, found.trainer_cpu_s, found.trainer_queued_s) == pytest.approx((4.0, 0.4, 0.1))
    assert (found.copied, found.read_bytes) == (2, 800_000)
    assert (found.slots, found.slots_lent, found.slots_wanted, found.cpus, found.threads) == (6, 2, 6, 4.0, 1)
    assert found.start_s == 0.0
    from_the_start = observed_in([seen(0), seen(1)], ABOUT, 60.0)
    assert (from_the_start.start_s, from_the_start.seconds, from_the_start.wait_s) == (3.0, 5.0, 4.0)
    assert from_the_start.elapsed_s == 5.0
    assert observed_in([seen(0), seen(5)], ABOUT, 60.0).start_s == 0.0  # most was waited later


def test_of_lent_slots_the_most_are_told() -> None:
    """A training that is over has let go of its arrays, whatever it kept."""
    looks = [seen(number) for number in range(6)]
    full = looks[3]._replace(work=looks[3].work._replace(slots_lent=5))
    assert observed_in([*looks[:3], full, *looks[4:]], ABOUT, 60.0).slots_lent == 5
    assert observed_in([*looks[:3], full, *looks[4:]], ABOUT, 3.0).slots_lent == 2


def test_one_look_tells_nothing() -> None:
    found = observed_in([seen(3)], ABOUT, 60.0)
    assert (found.steps, found.seconds, found.wait_share, found.ready_step_s) == (0, 0.0, 0.0, None)


def test_what_the_kernel_counts_of_a_worker_that_was_replaced_begins_anew() -> None:
    found = observed_in([seen(1, workers=1), seen(2, workers=1, pid=500)], ABOUT, 60.0)
    assert (found.busy_s, found.cpu_s, found.read_bytes) == (1.0, 1.0, 400_000)


def test_how_fast_other_numbers_of_workers_were() -> None:
    looks = [seen(0, 1), seen(1, 1), seen(2, 3), seen(3, 3)]
    assert observed_in(looks, ABOUT, 60.0).paces == (Pace(1, 320.0, 1 / 1280), Pace(3, 320.0, 3 / 1280))


def test_looks_travel_as_json() -> None:
    assert look_from_json(json.loads(json.dumps(look_to_json(seen(5))))) == seen(5)
    decided = Autotuned(8, tuple(Decision(1.5 * each, each, each + 1, "data") for each in range(1, 20)))
    full = seen(5)._replace(by_tf_data=True, autotuned=decided)
    travelled = look_from_json(json.loads(json.dumps(look_to_json(full))))
    assert travelled == full._replace(autotuned=decided._replace(decisions=decided.decisions[-8:]))
    assert len(json.dumps(look_to_json(full._replace(autotuned=decided)))) < 4096


def test_what_was_measured_with_other_numbers_of_workers_is_left_out_once_there_is_enough_of_these() -> None:
    looks = [seen(0, 1), seen(1, 1), seen(2, 3), seen(3, 3), seen(4, 3)]
    assert observed_in(looks, ABOUT, 60.0).steps == 40
    assert observed_in(looks[:3], ABOUT, 60.0).steps == 40  # one look with three workers tells nothing
    assert observed_in(looks[:4], ABOUT, 60.0).steps == 20


def page_file() -> int:
    """A descriptor of this process's page, as a reader opens it."""
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.lexists(path) and re.search("memfd:loaderpool-looks", os.readlink(path)):
            return os.open(path, os.O_RDONLY)
    raise AssertionError("there is no page")


def test_a_page_has_the_latest_looks() -> None:
    page = LooksPage(ABOUT, {"pid": 17})
    for number in range(40):
        page.write(seen(number))
    page.note_ask(5)
    descriptor = page_file()
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as data:
        content = PageContent(data[:])
    assert (content.about, content.more, content.asked_ns) == (ABOUT, {"pid": 17}, 5)
    assert content.looks == [seen(number) for number in range(8, 40)]
    page.note_hand_over(9)
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as data:
        content = PageContent(data[:])
    assert (content.asked_ns, content.handed_over_ns) == (0, 9)
    os.close(descriptor)


def test_nobody_else_can_write_to_it() -> None:
    page = LooksPage(ABOUT, {})
    descriptor = page_file()
    with pytest.raises(OSError, match=r"not permitted|Bad file|denied"):
        os.write(descriptor, b"x")
    with pytest.raises(OSError, match=r"not permitted|Bad file|denied"):
        mmap.mmap(descriptor, 0)
    path = f"/proc/self/fd/{descriptor}"
    try:
        writable = os.open(path, os.O_RDWR)  # root can
    except PermissionError:
        pass
    else:
        with pytest.raises(PermissionError):
            os.pwrite(writable, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(writable, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(writable, 10)
        os.close(writable)
    os.close(descriptor)
    page.write(seen(0))
