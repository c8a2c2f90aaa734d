"""Tensors of torch and JAX in a payload: their bytes lie beside the pickle, once, and nothing is lost on the way."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.child import run_child

TORCH = """
    import io, os, pickle
    import numpy as np, torch
    import loaderpool as lp
    from loaderpool.transport.payload.ship import ship
    from loaderpool.transport.pickling import receive
    from tests.support.shipping_child import in_child

    shm = set(os.listdir("/dev/shm"))
    table = torch.arange(40_000.0).reshape(-1, 4)
    row, column = table[3], table[:, 1]
    small, none = torch.ones(3, 2).T, torch.empty(0)
    half = torch.ones(40_000, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.ones(2))
    payload = dict(table=table, row=row, column=column, small=small, none=none, half=half, weight=weight)
    shipment = ship(dict(source=payload))

    # the bytes are the tensor's own, and what looks at the same memory travels once
    assert [buffer.nbytes for buffer in shipment.buffers] == [160_000, 80_000], shipment.buffers
    assert np.frombuffer(shipment.buffers[0], np.uint8).ctypes.data == table.data_ptr()
    assert len(shipment.pickled) < 4000
    assert "torch" not in shipment.without

    memory = [memoryview(bytearray(buffer)) for buffer in shipment.buffers]
    loaded = receive(shipment.pickled, memory)["source"]
    assert all(torch.equal(loaded[name], value) for name, value in payload.items())
    assert loaded["small"].stride() == small.stride() and loaded["half"].dtype == torch.bfloat16
    assert type(loaded["weight"]) is torch.nn.Parameter and loaded["weight"].requires_grad
    loaded["table"][3, 1] = -1.0  # as in the trainer, views are of one memory, and it may be written to
    assert loaded["row"][1] == loaded["column"][3] == -1.0 and table[3, 1] == 13.0
    assert np.frombuffer(memory[0], np.float32)[13] == -1.0

    expression = "(source['row'].tolist(), float(source['half'][7]), source['weight'].requires_grad)"
    assert in_child(shipment, expression) == (([12.0, 13.0, 14.0, 15.0], 1.0, True), ["torch"])
    assert set(os.listdir("/dev/shm")) == shm

    elsewhere = torch.UntypedStorage(8, device="meta")  # as one on a GPU is
    try:
        ship(dict(fn=lambda i: elsewhere))
    except lp.UnpicklableError as error:
        assert "'elsewhere'" in str(error) and "on meta, but workers use only the CPU" in str(error), error
    else:
        raise AssertionError
    print("all shown")
"""

JAX = """
    import numpy as np, jax, jax.numpy as jnp
    from loaderpool.transport.payload.ship import ship
    from loaderpool.transport.pickling import receive
    from tests.support.shipping_child import in_child

    table = jnp.arange(40_000.0).reshape(-1, 4)
    half, weak, key = jnp.ones(40_000, jnp.bfloat16), jnp.asarray(2.0), jax.random.key(3)
    shipment = ship(dict(source=dict(table=table, half=half, weak=weak)))
    assert [buffer.nbytes for buffer in shipment.buffers] == [160_000, 80_000]
    assert np.frombuffer(shipment.buffers[0], np.uint8).ctypes.data == table.unsafe_buffer_pointer()
    assert "JAX" not in shipment.without and weak.weak_type

    block = np.zeros(160_000 + 64, np.uint8)  # aligned as the arena's extents are: then it is taken as it is
    memory = block[-block.ctypes.data % 64 :][:160_000]
    memory[:] = shipment.buffers[0]
    loaded = receive(shipment.pickled, [memory.data, memoryview(bytearray(shipment.buffers[1]))])["source"]
    assert loaded["table"].unsafe_buffer_pointer() == memory.ctypes.data
    assert (loaded["table"] == table).all() and loaded["half"].dtype == jnp.bfloat16 and loaded["weak"].weak_type
    expression = "(source['table'][3].tolist(), float(source['half'][0]), type(source['table']).__name__)"
    assert in_child(shipment, expression) == (([12.0, 13.0, 14.0, 15.0], 1.0, "ArrayImpl"), ["jax"])
    print("all shown")
"""


@pytest.mark.parametrize(("package", "script"), [("torch", TORCH), ("jax", JAX)])
def test_tensors_travel_beside_the_pickle(package: str, script: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert run_child(script, timeout_s=90).check().stdout == "all shown\n"
