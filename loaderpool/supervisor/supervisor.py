"""The supervisor process: a clean interpreter that loads functions and starts workers.

It has one thread and one loop. The loop waits for messages and for deaths of processes, passes them
to `State` as events, and carries out the instructions of `State`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from loaderpool.errors import LoaderpoolError, PoolBrokenError
from loaderpool.memory.arena import HEADROOM_BYTES, PAGE_BYTES, Arena, ExtentMap, SlotFile
from loaderpool.memory.board import Field, TrialResult
from loaderpool.plan.batches import Numbering
from loaderpool.plan.drawn import read_order
from loaderpool.supervisor import records
from loaderpool.supervisor.processes import Processes, WorkerProcess, fault_in, look_ns
from loaderpool.supervisor.state import State
from loaderpool.system import capacity, clock, fault_points, machine, process
from loaderpool.system.machine import StopWatch
from loaderpool.transport import messages, reports
from loaderpool.transport.channel import Channel, ChannelClosed, LostPacket, Received, most_messages
from loaderpool.transport.modules import ModuleStore, keep
from loaderpool.transport.payload.loaded import (
    ForkCheck,
    Payloads,
    describe_load_error,
    why_not_forked,
)
from loaderpool.transport.pickling import receive, send
from loaderpool.transport.reports import GivenUp, LostReport, describe_failure, describe_timeout

if TYPE_CHECKING:
    from loaderpool.supervisor.trial import Trial
    from loaderpool.worker.tickets import Probe

_LOOK_MS = 200  # time between two checks of processes without a pidfd
# Time between two checks of the clock during a trial, whose pauses last tenths of a second.
_TRIAL_LOOK_MS = 20
# Time for which a worker waits for a used slot before it gets a large fresh one. Smaller: the
# consumer has no time to release the last batch. Larger: the first batches are read ahead later.
_SLOT_WAIT_MS = 5
# Time in which answers gather, if several are expected. Smaller: this process and the main process
# wake up for each answer, which costs more CPU time than the messages. Larger: consumers wait
# longer for a batch.
_GATHER_S = 0.001
_FOR_OTHERS = 48  # messages in the main process's channel that are not about slots
_SIGKILL = -9  # exit code of a process that was killed by SIGKILL
# Least number of deaths at one sample if workers have threads. The first attempt uses threads, so
# its death may be blamed on another sample.
_DEATHS_WITH_THREADS = 3


class Ticks:
    """Times of the loop's ticks: one every `every_ms`, which is at most `longest_ms`."""

    def __init__(self, longest_ms: int) -> None:
        self.every_ms = self.longest_ms = longest_ms
        self.due_ns = 0  # time of the next tick

    def is_due(self) -> bool:
        """Return True if it is time for a tick. The next one is due after `every_ms`."""
        if (now_ns := clock.monotonic_ns()) < self.due_ns:
            return False
        self.due_ns = now_ns + self.every_ms * 1_000_000
        return True


class LoadedCode:
    """Code and objects that forked workers inherit.

    Loaded objects are frozen. A collection in a worker would copy the pages of all of them.

    Attributes:
        check: finds what makes a fork unsafe.
        has_unloaded: True if a payload was unloaded since the last `freeze`.
    """

    def __init__(self) -> None:
        self.check = ForkCheck()
        self._has_loaded = self.has_unloaded = False

    def freeze(self, private: Sequence[int]) -> None:
        """Freeze the objects of a payload that was loaded.

        Args:
            private: Descriptors that workers close.
        """
        # The first payload leaves only cycles from its imports, which are not worth a collection.
        if self._has_loaded:
            # Unloaded functions are in cycles with their globals. Frozen objects are not collected.
            if self.has_unloaded:
                gc.unfreeze()
            gc.collect()
        self._has_loaded, self.has_unloaded = True, False
        self.check.handles.note_load(private)
        gc.freeze()


class Supervisor:
    """The loop of the supervisor process.

    Args:
        start: Settings from `Session` and the pool, by name.
    """

    of_nodes = False  # True if the workers are nodes of a cluster
    sends_files = True  # False if messages to workers cannot carry descriptors

    def __init__(self, start: Mapping[str, Any]) -> None:
        self._main_pid: int = start["trainer_pid"]
        self._size: int = start["workers"]  # requested number of workers
        self._restarts: tuple[int, float] | None = start["max_restarts"]
        self._selector = selectors.DefaultSelector()
        self._needs_slots = False  # True while the loop also waits for releases
        # Start of a worker's wait for a used slot; 0: no worker waits.
        self._withheld_since_ns = 0
        most_messages = self._open(start)
        self._code = LoadedCode()
        self._payloads = Payloads(self._arena, {})
        self._forms: dict[int, bytes] = {}
        space = ExtentMap(PAGE_BYTES, self._slots.nbytes)
        most_slots = max(2, most_messages - _FOR_OTHERS)
        self._state = State(
            start["workers"], space, most_slots, self._restarts, self.of_nodes, self.sends_files
        )
        tick_ms = StopWatch().look_ms
        self._ticks = Ticks(min(tick_ms, _LOOK_MS) if self._main_pidfd is None else tick_ms)
        self._oom_watch = capacity.OomWatch()
        self._has_told_of_exec = self._is_over = False
        self._dead: list[WorkerProcess] = []
        self._trial: Trial | None = None
        self._trials: int = self._arena.board.trials
        # A trial of an earlier supervisor, which was lost, ends without a result.
        if self._trials != self._arena.board.trials_over:
            self._arena.board.end_trial(self._trials, TrialResult())
        self._workers = self._make_workers(start)

    def _open(self, start: Mapping[str, Any]) -> int:
        """Open the channel, arena and slots. Return the capacity of the channel in messages."""
        self._main = Channel(socket.socket(fileno=start["channel"]))
        self._releases = Channel(socket.socket(fileno=start["releases"]))
        self._arena = Arena(start["arena"], start["arena_bytes"])
        self._arena.board.begun = 1
        self._slots = SlotFile(start["slots"])
        # The pidfd reports the main process's death even if a fork still holds the channel's end.
        self._main_pidfd = machine.open_pidfd(self._main_pid)
        self._listen(self._main.fileno(), self._read_main)
        if self._main_pidfd is not None:
            self._listen(self._main_pidfd, self._leave)
        return most_messages()

    def _make_workers(self, start: Mapping[str, Any]) -> Processes:
        return Processes(
            self._arena, self._slots, self._payloads, self._forms, start, self._private
        )

    def run(self) -> None:
        """Run until the main process is gone or has closed its end. Then end all workers."""
        try:
            while not self._is_over:
                self._wait()
                self._look_at_clock()
                # Deaths come last, after all messages of the dead workers were read.
                while self._dead:
                    self._on_death(self._dead.pop())
                self._deal()
                if self._trial is not None:
                    self._go_on_with(self._trial)
                self._carry_out()
                self._update_release_listener()
        except ChannelClosed:
            pass
        finally:
            for run in self._state.runs:
                self._arena.board.abandon(run)
            self._workers.end_all()

    def _deal(self) -> None:
        """Assign tickets. After a wait of `_SLOT_WAIT_MS`, a worker may get a large fresh slot."""
        state, now_ns = self._state, clock.monotonic_ns() if self._withheld_since_ns else 0
        has_waited = 0 < self._withheld_since_ns <= now_ns - _SLOT_WAIT_MS * 1_000_000
        state.deal(has_waited)
        if not state.has_withheld_slot:
            self._withheld_since_ns = 0
        elif not self._withheld_since_ns:
            self._withheld_since_ns = clock.monotonic_ns()

    # ---- waiting

    def _wait(self) -> None:
        """Wait for messages, deaths or the next tick, and handle the messages and deaths."""
        if self._state.expects_several_answers(_GATHER_S):
            time.sleep(_GATHER_S)
        for key, _ in self._selector.select(self._wait_s):
            key.data()

    @property
    def _wait_s(self) -> float:
        longest_ms = self._ticks.every_ms
        if self._trial is not None:
            longest_ms = min(longest_ms, _TRIAL_LOOK_MS)
        if self._withheld_since_ns and self._state.roomy:
            longest_ms = min(longest_ms, _SLOT_WAIT_MS)
        return longest_ms / 1000

    def _listen(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, handler)

    def _ignore(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def _private(self) -> list[int]:
        mine = [self._main.fileno(), self._releases.fileno(), self._selector.fileno()]
        mine += [] if self._main_pidfd is None else [self._main_pidfd]
        mine += [file for files in self._payloads.files.values() for file in files]
        return mine + self._state.files

    def _look_at_clock(self) -> None:
        """Run `_on_tick` if its time has come."""
        if self._ticks.is_due():
            self._on_tick()

    def _on_tick(self) -> None:
        watched = self._watched()
        self._workers.end_hung(watched)
        self._set_tick([timeout_ns for _, timeout_ns in watched])
        self._oom_watch.look()
        self._workers.end_stopped()
        self._dead += [
            worker for worker in self._workers.without_pidfd if worker.process.poll() is not None
        ]
        self._is_over |= self._main_pidfd is None and os.getppid() != self._main_pid
        self._note_size()  # the size may have changed while an earlier `Resize` was counted
        self._read_releases()  # an ended run is removed with its last release
        self._begin_trial()
        self._state.tick()

    def _watched(self) -> list[tuple[WorkerProcess, int]]:
        """Return the running workers whose ticket has a timeout, and the timeout in nanoseconds."""
        found = []
        for number, worker in self._workers.by_number.items():
            job = self._state.running(number)
            timeout_s = job.loader.timeout_s if job is not None else None
            if timeout_s is not None and not worker.is_stopped:
                found.append((worker, int(timeout_s * 1e9)))
        return found

    def _set_tick(self, watched_ns: list[int]) -> None:
        """Set the time between two ticks, by the shortest timeout.

        Args:
            watched_ns: Timeouts of running samples. Their loaders may be unloaded already.
        """
        given = [loader.timeout_s for loader in self._state.loaders.values()]
        timeouts_ns = [int(timeout_s * 1e9) for timeout_s in given if timeout_s is not None]
        looks_ms = [look_ns(each) // 1_000_000 for each in (*timeouts_ns, *watched_ns)]
        self._ticks.every_ms = min([self._ticks.longest_ms, *looks_ms])

    def _leave(self) -> None:
        self._is_over = True

    # ---- trials of fewer workers

    def _begin_trial(self) -> None:
        """Start a trial that the main process has requested on the board. Nodes have no trials."""
        number = self._arena.board.trials
        if number != self._trials and not self.of_nodes:
            # Imported here, because few loaders have a trial.
            from loaderpool.supervisor.trial import Trial

            self._trials = number
            self._trial = Trial(self._state, self._arena.board.trial_ms / 1000, clock.monotonic_s())

    def _go_on_with(self, trial: Trial) -> None:
        if trial.look(clock.monotonic_s()):
            self._state.deal()
        if trial.is_over:
            self._arena.board.trial_idle_ns += int(trial.idle_s * 1e9)
            self._arena.board.end_trial(self._trials, trial.result)
            self._trial = None

    # ---- messages of the main process

    def _read_main(self) -> None:
        while not self._is_over and (received := self._main.receive()) is not None:
            self._on_main(received)

    def _read_release(self) -> bool:
        """Read one release. Return False if there is none."""
        try:
            received = self._releases.receive()
        except ChannelClosed:  # the other channel raises it, too, which ends the loop
            return False
        if received is not None:
            self._state.release(*received.message)
        return received is not None

    def _read_releases(self) -> None:
        while self._read_release():
            pass

    def _update_release_listener(self) -> None:
        """Make the loop wait for releases while a worker can accept another ticket.

        At other times a release changes nothing, so only one is read with each `Done`. Then the
        supervisor wakes up half as often.
        """
        needs_slots = bool(self._state.roomy)
        if needs_slots == self._needs_slots:
            return
        self._needs_slots = needs_slots
        if needs_slots:
            self._listen(self._releases.fileno(), self._read_releases)
        else:
            self._ignore(self._releases.fileno())

    def _on_main(self, received: Received) -> None:
        state, message = self._state, received.message
        match message:
            case messages.Release():  # if workers are spawned: there is only one channel
                state.release(*message)
            case messages.Begin():
                self._begin(message)
            case messages.Extend():
                state.extend(*message)
            case messages.End(number, lent) if number in state.runs:
                state.end(number, lent)
            case messages.End(number):  # ends a loader, or a run that had no slot
                self._unload(number)
            case messages.Resize():
                self._arena.board.resizes += 1  # SYNC: counted first; pairs with PoolWorkers.resize
                self._note_size()
            case messages.Look():
                self._look(message)
            case messages.Found():
                self._take_form(message)
            case messages.Load():
                self._load(message, received)

    def _note_size(self) -> None:
        """Resize to the size on the board, if it differs from the present one."""
        size = self._arena.board.size - 1
        if size not in (-1, self._size):
            self._size = size
            self._resize(size)

    def _resize(self, size: int) -> None:
        self._note_free_memory()
        self._state.resize(size)

    def _note_free_memory(self) -> None:
        self._state.slots.free_bytes = max(0, capacity.available_memory_bytes() - HEADROOM_BYTES)

    def _look(self, message: messages.Look) -> None:
        self._state.look(message)

    def _begin(self, message: messages.Begin) -> None:
        self._read_releases()  # the run may get the memory of slots that were released before
        self._note_free_memory()
        settings = self._payloads.settings.get(message.loader)
        plan = None
        if settings is not None and (message.rest or settings.plan.order.is_drawn):
            whole = settings.plan
            if whole.order.is_drawn:
                whole = read_order(whole, self._arena.map, message.feed)
            epoch = message.first // whole.batches_per_epoch
            plan = Numbering(whole, epoch, message.rest)
        self._state.begin(message, plan)

    def _load(self, message: messages.Load, received: Received) -> None:
        # Assign all work now, because no work is assigned while modules are imported.
        self._read_releases()
        self._state.deal()
        self._carry_out()
        number = message.loader
        self._payloads.files[number] = list(received.descriptors)
        try:
            self._arena.board.loading = number
            with _ends_with(self._main_pid):
                fault_points.reach("supervisor.loading")
                self._payloads.load(number, message.offset, message.nbytes)
        except BaseException as error:
            self._main.send(messages.Status(number, self._refusal(error)))
            return
        finally:
            self._arena.board.loading = 0
        self._code.freeze(self._workers.private())
        self._on_loaded(number)

    def _on_loaded(self, number: int) -> None:
        settings = self._payloads.settings[number]
        config = settings.config
        if settings.plan.lanes or settings.is_async:
            self._workers.end_gently = True
        action = config.on_error.action
        leaves_out = action == "skip" or (action == "replace" and settings.unit == "sample")
        self._main.send(messages.Status(number))
        most_deaths = config.limits.restarts_per_item
        # Only calls made one by one show for certain which sample ends its worker.
        if config.threads > 1:
            most_deaths = max(_DEATHS_WITH_THREADS, most_deaths)
        # Nodes have supervisors of their own, which watch the timeouts of their samples.
        timeout_s = None if self.of_nodes else config.limits.timeout_s
        self._state.load(
            number, Numbering(settings.plan), leaves_out, most_deaths, settings.loader, timeout_s
        )
        self._ticks.due_ns = 0  # so that the next tick uses this loader's timeout

    def _refusal(self, error: BaseException) -> bytes:
        failure = describe_failure(error, epoch=0, worker=None)
        place = f"the supervisor{f' on node {failure.node}' if failure.node else ''}"
        what = f"{place} could not load the function and the source"
        return reports.of_setup(failure, what, describe_load_error(error, place), place)

    def _unload(self, number: int) -> None:
        self._state.unload(number)
        self._main.send(messages.Ended(number))
        self._payloads.unload(number)
        self._code.has_unloaded = True
        self._forms.pop(number, None)
        self._carry_out()

    def _take_form(self, message: messages.Found) -> None:
        """Use the form of a loader's batches that was known before this supervisor started."""
        from loaderpool.supervisor import forms

        settings = self._payloads.settings.get(message.loader)
        if settings is None:
            return
        self._tell_workers(message)
        form, _ = receive(message.content, own=message.loader)
        self._state.lay_out(message.loader, forms.known_layout(form, settings), message.seconds)

    def _lay_out(self, number: int, probe: Probe) -> None:
        """Choose the form of the batches from the first sample. Send it to all processes."""
        # Imported here, so that the start of the supervisor does not wait for it.
        from loaderpool.supervisor import forms

        settings = self._payloads.settings[number]
        try:
            form, layout, row_s = forms.choose(probe, settings, self._state.width)
        except LoaderpoolError as error:
            self._state.fail(number, reports.of_error(error))
            return
        found = messages.Found(0, number, send((form, settings.given_spec is not None)), row_s)
        self._main.send(found)
        self._tell_workers(found)
        self._state.lay_out(number, layout, row_s)

    def _tell_workers(self, form: messages.Found) -> None:
        self._forms[form.loader] = form.content
        for worker in self._workers.by_number.values():
            self._send_to_worker(worker, form)
        self._note_free_memory()  # runs get slots after this

    # ---- messages and deaths of workers

    def _read_worker(self, worker: WorkerProcess, is_all: bool = False) -> None:
        """Read one message from a worker, or all if `is_all`. The next wait reports the others."""
        try:
            while (received := worker.channel.receive()) is not None:
                self._on_worker(worker.number, received)
                if not is_all:
                    return
        except ChannelClosed:
            self._ignore(worker.channel.fileno())
        except LostPacket:  # another worker gets the ticket of this one
            worker.kill()

    def _on_worker(self, number: int, received: Received) -> None:
        message: messages.Message = received.message
        match message:
            case messages.Done():
                if not self._needs_slots:
                    self._read_release()
                loader = self._state.done(
                    number, message, received.descriptors[0] if received.descriptors else None
                )
                if self._trial is not None:
                    self._trial.note(number, loader, message.rows, clock.monotonic_s())
            case messages.Found(loader=loader):
                if self._state.found(number, message) and loader in self._payloads.settings:
                    self._on_found(message)

    def _on_found(self, message: messages.Found) -> None:
        """Choose the form of a loader's batches, unless it is known."""
        if message.loader not in self._forms:
            self._lay_out(message.loader, receive(message.content, own=message.loader))

    def _on_death(self, worker: WorkerProcess) -> None:
        if worker.number not in self._workers.by_number:
            return
        fault_points.reach("supervisor.burying")
        if worker.pidfd is not None:
            self._ignore(worker.pidfd)
        self._read_worker(worker, is_all=True)  # a ticket with an answer is done
        self._ignore(worker.channel.fileno())
        exit_code = self._workers.bury(worker)  # after this, its cell does not change any more
        read = self._arena.board.read
        ticket, index = read(worker.cell, Field.TICKET), read(worker.cell, Field.INDEX) - 1
        death = self._death_of(worker, index, exit_code)
        if self._state.died(worker.number, clock.monotonic_s(), ticket, death):
            self._arena.board.lost += 1
        self._workers.free(worker)

    def _death_of(self, worker: WorkerProcess, index: int, exit_code: int) -> records.Death:
        read, sample = self._arena.board.read, worker.sample
        in_setup, in_generator = (
            bool(read(worker.cell, Field.IN_SETUP)),
            bool(read(worker.cell, Field.IN_GENERATOR)),
        )
        is_out_of_memory = exit_code == _SIGKILL and self._oom_watch.has_killed()
        stacks = fault_in(worker.stacks.read())
        job = self._state.running(worker.number)
        timeout_s = job.loader.timeout_s or 0.0 if job is not None else 0.0
        hung_s, rows = 0.0, max(1, read(worker.cell, Field.BLOCK))
        if sample.index is not None and sample.ticket == read(worker.cell, Field.TICKET):
            index, hung_s = sample.index, sample.ran_ns / 1e9

        def error(why: GivenUp, deaths: int, ticket: messages.Ticket | None) -> bytes:
            epoch = ticket.epoch if ticket is not None else 0
            if hung_s and why is GivenUp.ALONE and ticket is not None:
                failure = describe_timeout(
                    index=index, epoch=epoch, worker=worker.number, ran_s=hung_s,
                    in_generator=in_generator, timeout_s=timeout_s,
                    stacks=sample.stacks_text, rows=rows,
                )  # fmt: skip
                return reports.of_sample(failure)
            report = LostReport(
                why, index if index >= 0 else None, epoch, exit_code, worker.pid, deaths, stacks,
                is_out_of_memory, was_stopped=worker.was_stopped, in_setup=in_setup,
                max_restarts=self._restarts, node=process.node(),
            )  # fmt: skip
            if ticket is not None and ticket.loader in self._payloads.settings:
                settings = self._payloads.settings[ticket.loader]
                report = report._replace(batch_argument=settings.batch_argument)
            return reports.of_deaths(report)

        has_begun = bool(read(worker.cell, Field.BEGUN))
        return records.Death(error, index, hung_s, exit_code, has_begun, in_generator, rows)

    # ---- instructions

    def _carry_out(self) -> None:
        while instructions := self._state.instructions[:]:
            self._state.instructions.clear()
            for instruction in instructions:
                self._obey(instruction)

    def _obey(self, instruction: records.Instruction) -> None:
        match instruction:
            case records.ToWorker(number, message, file):
                worker = self._workers.by_number.get(number)
                if worker is not None:
                    fault_points.reach("supervisor.dealing")
                    self._send_to_worker(worker, message, () if file is None else (file,))
            case records.ToMain(message, file):
                self._main.send(message, () if file is None else (file,))
                if file is not None:
                    self._close_file(file)
            case records.Start(number):
                self._start(number)
            case records.Stop(number):
                worker = self._workers.by_number.get(number)
                if worker is not None:
                    worker.channel.end_sending()
            case records.Abandon(run):
                self._arena.board.abandon(run)
            case records.ReturnPages(offset, nbytes):
                self._slots.return_pages(offset, nbytes)
            case records.DropFile(file):
                self._close_file(file)

    _close_file = staticmethod(os.close)

    def _send_to_worker(
        self, worker: WorkerProcess, message: messages.Message, files: Sequence[int] = ()
    ) -> None:
        try:
            worker.channel.send(message, files)
        except OSError:  # no descriptor for a long message; another worker gets the ticket
            worker.kill()

    def _obstacles(self) -> Sequence[str]:
        """Return the reasons not to fork workers. Empty if they are forked."""
        return self._code.check.obstacles(self._workers.private())

    def _start(self, number: int) -> None:
        obstacles = self._obstacles()
        # Sent before any message of a worker that was started by exec.
        if obstacles and not self._has_told_of_exec:
            self._has_told_of_exec = True
            self._main.send(
                messages.Warn(why_not_forked(obstacles, process.node()), are_not_forked=True)
            )
        try:
            worker = self._workers.start(
                number, None if obstacles else self._code.check.handles.files
            )
        except (OSError, PoolBrokenError) as error:
            failure = describe_failure(error, epoch=0, worker=number)
            packed = reports.of_setup(
                failure, "no worker could be started", capacity.START_ADVICE, None
            )
            self._state.not_started(number, packed)
            return
        fault_points.reach("supervisor.forked")
        self._listen(worker.channel.fileno(), functools.partial(self._read_worker, worker))
        if worker.pidfd is not None:
            self._listen(worker.pidfd, lambda: self._dead.append(worker))


@contextlib.contextmanager
def _ends_with(main_pid: int) -> Iterator[None]:
    """Check by a timer if the main process has died, and end this process if so.

    Used while the user's modules are imported, which may take long. The loop does not run then.
    """

    def look(*_: object) -> None:
        if os.getppid() != main_pid:
            _end_group()

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_MS / 1000, _LOOK_MS / 1000)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _end_group() -> NoReturn:
    """End this process, and all processes that the user's function has started and left running."""
    if os.getpgrp() == os.getpid():  # otherwise this is the main process's group
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def main(start: Mapping[str, Any]) -> None:
    """Run the supervisor process until its end. Called by the boot code of `child_process`."""
    serve(start, Supervisor, "supervisor")


def serve(
    start: Mapping[str, Any], program: Callable[[Mapping[str, Any]], Supervisor], role: process.Role
) -> None:
    """Run the process in the supervisor's place until its end.

    Args:
        start: Settings of the start, by name.
        program: Makes the supervisor from `start`.
        role: Role of the process.
    """
    process.become(role, start.get("node"))
    machine.wake_when_orphaned()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, exit statuses are lost
    if os.getppid() != start["trainer_pid"]:
        return  # the main process died during this start
    machine.raise_descriptor_limit()
    keep(ModuleStore(start["modules"]))
    try:
        supervisor = program(start)
    except ProcessLookupError:
        return  # the main process has just died
    try:
        supervisor.run()
    # An internal error, or a signal from outside. Print it; the pool starts another supervisor.
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        machine.flush_standard_streams()
        _end_group()
