"""Objects arrive unchanged in an interpreter that shares nothing with this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from loaderpool.transport.payload.pickler import OUT_OF_BAND_BYTES
from loaderpool.transport.payload.ship import ship
from loaderpool.transport.pickling import receive
from tests.support.shipping_child import in_child

pytestmark = pytest.mark.corner


def round_trip(**payload: Any) -> dict[str, Any]:
    shipment = ship(payload)
    return receive(shipment.pickled, shipment.buffers)


# -- arrays


def test_only_buffers_of_the_threshold_and_more_travel_beside_the_pickle() -> None:
    under = np.arange(OUT_OF_BAND_BYTES - 1, dtype=np.uint8)
    at = np.arange(OUT_OF_BAND_BYTES, dtype=np.uint8)
    shipment = ship({"under": under, "at": at})
    assert [buffer.nbytes for buffer in shipment.buffers] == [OUT_OF_BAND_BYTES]
    assert under.tobytes() in shipment.pickled
    payload = receive(memoryview(shipment.pickled), shipment.buffers)
    assert np.array_equal(payload["under"], under) and np.array_equal(payload["at"], at)


def test_an_array_beside_the_pickle_is_not_copied_on_either_side() -> None:
    array = np.zeros((3, OUT_OF_BAND_BYTES), np.float32)
    shipment = ship({"array": array})
    array[1, 2] = 7  # the shipment has a view, which sees this
    memory = bytearray(shipment.buffers[0])
    loaded = receive(shipment.pickled, [memoryview(memory)])["array"]
    assert loaded[1, 2] == 7 and loaded.shape == array.shape
    memory[:4] = np.float32(5).tobytes()
    assert loaded[0, 0] == 5


@pytest.mark.parametrize("order", ["C", "F", "strided", "reversed"])
def test_arrays_of_any_layout_arrive_equal(order: str) -> None:
    base = np.random.default_rng(0).normal(size=(300, 200))
    array = {
        "C": base,
        "F": np.asfortranarray(base),
        "strided": base[::2, ::3],
        "reversed": base[::-1],
    }[order]
    shipment = ship({"array": array})
    assert all(
        buffer.c_contiguous and buffer.ndim == 1 and buffer.format == "B"
        for buffer in shipment.buffers
    )
    assert np.array_equal(receive(shipment.pickled, shipment.buffers)["array"], array)


def test_an_array_used_twice_travels_once_and_is_one_array_there() -> None:
    array = np.zeros(OUT_OF_BAND_BYTES)
    shipment = ship({"fn": lambda i: array[i], "source": [array]})
    assert len(shipment.buffers) == 1
    same, loaded = in_child(shipment, "fn.__closure__[0].cell_contents is source[0]")
    assert same is True and loaded == []


def test_a_memmap_goes_by_path_whatever_part_of_the_file_it_shows(tmp_path: Path) -> None:
    np.arange(100_000, dtype=np.int32).tofile(tmp_path / "data")
    whole = np.memmap(tmp_path / "data", dtype=np.int32, mode="r", offset=400, shape=(300, 300))
    views = {
        "whole": whole,
        "rows": whole[10:20],
        "columns": whole[:, 5:7],
        "turned": whole.T,
        "back": whole[::-2],
    }
    shipment = ship(dict(views))
    assert shipment.buffers == () and len(shipment.pickled) < 5_000
    expression = "{name: (value.tolist(), isinstance(value, type(whole))) for name, value in "
    expression += "dict(whole=whole, rows=rows, columns=columns, turned=turned, back=back).items()}"
    arrived, _ = in_child(shipment, expression)
    for name, view in views.items():
        assert arrived[name][0] == view.tolist(), name
    assert arrived["whole"][1] and arrived["rows"][1]


def test_a_memmap_that_its_file_does_not_hold_goes_by_value(tmp_path: Path) -> None:
    np.zeros(1000, np.int64).tofile(tmp_path / "data")
    private = np.memmap(tmp_path / "data", dtype=np.int64, mode="c")
    private[3] = 5  # changes memory, not the file
    deleted = np.memmap(tmp_path / "deleted", dtype=np.int64, mode="w+", shape=(10,))
    deleted[:] = 9
    (tmp_path / "deleted").unlink()
    loaded = round_trip(private=private, deleted=deleted, empty=private[:0], chosen=private[[3, 3]])
    assert loaded["private"][3] == 5 and loaded["deleted"].tolist() == [9] * 10
    assert loaded["empty"].size == 0 and loaded["chosen"].tolist() == [5, 5]


def test_a_memmap_made_anew_is_not_emptied_by_its_arrival(tmp_path: Path) -> None:
    made = np.memmap(tmp_path / "data", dtype=np.uint8, mode="w+", shape=(4096,))
    made[:] = 3
    assert round_trip(made=made)["made"].sum() == 3 * 4096
    assert made.sum() == 3 * 4096


def test_windows_over_an_array_go_as_a_view_of_it() -> None:
    hours = np.arange(40_000, dtype=np.float32).reshape(10_000, 4)
    windows = sliding_window_view(hours[::2], 24, axis=0)
    views = {
        "windows": windows,
        "back": windows[::-3],
        "same": np.broadcast_to(hours, (50, *hours.shape)),
    }
    shipment = ship(dict(views))
    assert sum(buffer.nbytes for buffer in shipment.buffers) == hours.nbytes
    assert len(shipment.pickled) < 5_000
    loaded = round_trip(**views)
    for name, view in views.items():
        assert np.array_equal(loaded[name], view), name
        assert not loaded[name].flags.writeable, name


@pytest.mark.parametrize("dtype", ["M8[s]", "O"])
def test_windows_that_no_buffer_can_show_go_by_value(dtype: str) -> None:
    windows = sliding_window_view(np.arange(5_000).astype(dtype), 24)
    assert np.array_equal(round_trip(windows=windows)["windows"], windows)


def test_windows_over_a_small_part_go_without_the_rest() -> None:
    large = np.arange(1_000_000)
    windows = sliding_window_view(large[:5_000], 24)
    shipment = ship({"windows": windows})
    assert sum(buffer.nbytes for buffer in shipment.buffers) + len(shipment.pickled) < large.nbytes
    assert np.array_equal(round_trip(windows=windows)["windows"], windows)


# -- code


def test_functions_of_one_payload_share_their_globals() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "count": 0}
    exec("def up():\n    global count\n    count += 1\ndef read():\n    return count", namespace)
    found, _ = in_child(
        ship({"fn": namespace["up"], "setup": namespace["read"]}), "(fn(), fn(), setup())[2]"
    )
    assert found == 2
