"""A view without its framework raises an error that names the package to install."""

from __future__ import annotations

import sys

import pytest

import loaderpool as lp


@pytest.mark.parametrize(
    ("view", "framework", "adapter", "message"),
    [
        ("as_torch", "torch", "torch_tensors", "as_torch needs PyTorch: pip install torch"),
        ("as_jax", "jax", "jax_arrays", "as_jax needs JAX: pip install jax"),
        (
            "as_dataset",
            "tensorflow",
            "tensorflow",
            "as_dataset needs TensorFlow: pip install 'loaderpool[tensorflow]'",
        ),
        (
            "tensors",
            "tensorflow",
            "eager_tensors",
            "tensors needs TensorFlow: pip install 'loaderpool[tensorflow]'",
        ),
    ],
)
def test_a_view_without_its_framework_says_what_to_install(
    view: str, framework: str, adapter: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, f"loaderpool.adapters.{adapter}", raising=False)
    with pytest.raises(ImportError) as raised, lp.Loader(range(3), workers=0) as loader:
        getattr(loader, view)()
    assert str(raised.value) == message
