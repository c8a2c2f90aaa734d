"""The CUDA driver: found where a framework uses it, left alone where none does, and each refusal told by its name."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from loaderpool.system import cuda_driver
from loaderpool.system.cuda_driver import CudaContext, CudaError, NoContextError, find_context
from tests.support.child import run_child
from tests.support.cuda_stand_in import StandIn

PAGES = 4 * 4096


@pytest.fixture
def memory() -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, PAGES), np.uint8)  # not of the heap, which forked children need


@pytest.fixture
def context(gpu: StandIn) -> Iterator[CudaContext]:
    context = find_context()
    yield context
    context.release()
    assert gpu.is_balanced and not gpu.violations and not gpu.retained()


def why_none() -> str:
    with pytest.raises(NoContextError) as raised:
        find_context()
    return str(raised.value)


# ---- whether there is a context ----


def test_a_library_that_no_framework_has_loaded_is_not_loaded(gpu_library: Path) -> None:
    script = f"""
        from loaderpool.system import cuda_driver

        cuda_driver.LIBRARY = {str(gpu_library)!r}
        try:
            cuda_driver.find_context()
        except cuda_driver.NoContextError as error:
            print(error)
        with open("/proc/self/maps") as file:
            assert "stand_in" not in file.read()
    """
    assert "no framework of this process has loaded the CUDA driver" in run_child(script).check().stdout


def test_no_driver_on_this_machine_is_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-of-no-machine.so.1")
    assert "libcuda-of-no-machine.so.1" in why_none()


def test_a_driver_that_no_framework_has_initialised_stays_so(gpu: StandIn) -> None:
    gpu.set_initialised(False)
    assert "CUDA_ERROR_NOT_INITIALIZED" in why_none()
    assert not gpu.violations


def test_a_driver_without_a_device(gpu: StandIn) -> None:
    gpu.set_devices(0)
    assert why_none() == "no CUDA device is visible"


def test_no_context_is_made(gpu: StandIn) -> None:
    gpu.begin(active=False)
    gpu.set_devices(4)
    assert why_none() == "no framework of this process has begun to use a GPU yet"
    assert not gpu.calls("cuDevicePrimaryCtxRetain") and not gpu.violations


@pytest.mark.parametrize(
    "call", ["cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain"]
)
@pytest.mark.parametrize("code", ["DEINITIALIZED", "NOT_INITIALIZED", "OUT_OF_MEMORY", "NO_DEVICE"])
def test_a_refusal_on_the_way_to_a_context_is_named(gpu: StandIn, call: str, code: str) -> None:
    gpu.fail(call, code)
    assert why_none() == f"no CUDA context can be used: {call} says CUDA_ERROR_{code}"
    assert not gpu.retained()


def test_the_device_that_is_used_is_found_among_others(gpu: StandIn) -> None:
    gpu.begin(active=False)
    gpu.set_devices(4)
    gpu.set_active(True, device=2)
    context = find_context()
    assert [gpu.retained(device) for device in range(4)] == [0, 0, 1, 0]
    context.release()
    assert not gpu.retained(2) and not gpu.violations


# ---- memory ----


def test_memory_is_registered_and_unregistered(
    gpu: StandIn, context: CudaContext, memory: npt.NDArray[np.uint8]
) -> None:
    context.register(memory.ctypes.data, memory.nbytes)
    assert gpu.sees(memory) and gpu.nbytes == PAGES
    context.unregister(memory.ctypes.data)
    assert not gpu.ranges


@pytest.mark.parametrize("call", ["cuCtxPushCurrent_v2", "cuThreadExchangeStreamCaptureMode", "cuMemHostRegister_v2"])
@pytest.mark.parametrize(
    "code", ["NOT_PERMITTED", "OUT_OF_MEMORY", "HOST_MEMORY_ALREADY_REGISTERED", "INVALID_CONTEXT"]
)
def test_memory_that_cannot_be_registered_is_not(
    gpu: StandIn, context: CudaContext, memory: npt.NDArray[np.uint8], call: str, code: str
) -> None:
    gpu.fail(call, code)
    with pytest.raises(CudaError, match=f"^{call} says CUDA_ERROR_{code}$") as raised:
        context.register(memory.ctypes.data, memory.nbytes)
    assert not raised.value.is_unregistered and not gpu.ranges and gpu.is_balanced


def test_a_number_that_the_driver_has_no_name_for_is_told(gpu: StandIn, context: CudaContext) -> None:
    with pytest.raises(CudaError, match=r"^cuMemHostRegister_v2 says 12345$"):
        _refuse(gpu, context)


def _refuse(gpu: StandIn, context: CudaContext) -> None:
    gpu._library.stand_in_fail(b"cuMemHostRegister_v2", 12345, 0)
    context.register(4096, 4096)


@pytest.mark.parametrize("call", ["cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode"])
def test_what_fails_behind_a_registration_does_not_hide_it(
    gpu: StandIn, memory: npt.NDArray[np.uint8], call: str
) -> None:
    context = find_context()
    gpu.fail(call, "DEINITIALIZED", after=1 if "Exchange" in call else 0)
    context.register(memory.ctypes.data, memory.nbytes)
    assert gpu.sees(memory)


@pytest.mark.parametrize(("code", "is_unregistered"), [
    ("DEINITIALIZED", True), ("HOST_MEMORY_NOT_REGISTERED", True), ("NOT_PERMITTED", False), ("INVALID_VALUE", False),
    ("CONTEXT_IS_DESTROYED", False), ("OUT_OF_MEMORY", False),
])  # fmt: skip
def test_a_refusal_to_unregister_says_whether_memory_may_be_locked(
    gpu: StandIn, memory: npt.NDArray[np.uint8], code: str, is_unregistered: bool
) -> None:
    context = find_context()
    context.register(memory.ctypes.data, memory.nbytes)
    gpu.fail("cuMemHostUnregister", code)
    with pytest.raises(CudaError) as raised:
        context.unregister(memory.ctypes.data)
    assert raised.value.is_unregistered is is_unregistered and gpu.is_balanced


def test_a_driver_that_is_too_old_is_a_refusal(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CudaError, match="this driver has no cuNothing"):
        cuda_driver._call(gpu._library, "cuNothing")


def test_a_context_that_the_driver_has_let_go_already_is_released_in_silence(gpu: StandIn) -> None:
    context = find_context()
    gpu.fail("cuDevicePrimaryCtxRelease_v2", "DEINITIALIZED")
    context.release()


def test_a_fork_of_a_process_that_uses_the_driver_does_not_call_it(gpu: StandIn) -> None:
    find_context().release()
    calls = gpu.calls("cuDeviceGetCount")
    child = os.fork()
    if not child:
        status = 1
        try:
            assert why_none() == "a forked child cannot use its parent's GPU"
            assert gpu.calls("cuDeviceGetCount") == calls and not gpu.violations
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
