"""Trainings with JAX and torch: imports of the workers, how they start, and no warning about a
fork.
"""

from __future__ import annotations

import ast
import importlib.util
import textwrap
from pathlib import Path

import pytest

from tests.support.child import run_child

SHOW = """
    import os, sys, warnings
    import numpy as np
    import loaderpool as lp

    def show(name, fn=None, source=range(8), **settings):
        with lp.Loader(source, fn, batch_size=4, workers=2, **settings) as loader:
            batches = [batch.tolist() for batch in loader]
            workers = [worker.pid for worker in loader.statistics().workers]
            with open(f"/proc/{workers[0]}/maps") as maps:
                text = maps.read()
            libraries = [library for library in ("libtorch_cpu", "libjax_common") if library in text]
            print(name, batches, loader.statistics().workers_start, libraries)
"""


def needs(package: str) -> pytest.MarkDecorator:
    """Skip the test without this package. Only a child imports it, because its threads would stay
    in this process.
    """
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"{package} is not installed"
    )


def shown(directory: Path, modules: dict[str, str], script: str) -> tuple[list[str], str]:
    """Run a script in a directory of its own, with warnings as errors. Return its output and its
    error stream.
    """
    for name, text in modules.items():
        (directory / f"{name}.py").write_text(textwrap.dedent(text))
    code = (
        f"import sys\nsys.path.insert(0, {str(directory)!r})\n"
        + textwrap.dedent(SHOW)
        + textwrap.dedent(script)
    )
    child = run_child(code, timeout_s=90).check()  # the import of torch takes a second
    return child.stdout.splitlines(), child.stderr


NUMPY_ONLY = """
    import {framework}
    import numpy as np
    def load(i): return np.full(2, i * 2.0)
"""
TORCH = """
    import numpy as np, torch
    scale = torch.ones(2)
    class Scale:
        def __call__(self, x): return torch.from_numpy(x).mul(scale)
    def load(i): return Scale()(np.full(2, i * 2.0))
"""
JAX = """
    import jax, jax.numpy as jnp
    def load(i): return jnp.full(2, i * 2.0)
"""
JAX_ON_IMPORT = "import jax.numpy as jnp\ntwo = jnp.ones(2) * 2\ndef load(i): return two * i"
BATCHES = "[[[0.0, 0.0], [2.0, 2.0], [4.0, 4.0], [6.0, 6.0]], [[8.0, 8.0], [10.0, 10.0], [12.0, 12.0], [14.0, 14.0]]]"


@needs("torch")
def test_a_training_of_torch_forks_workers_that_have_torch_where_they_use_it(
    tmp_path: Path,
) -> None:
    lines, errors = shown(
        tmp_path,
        {"numpy_only": NUMPY_ONLY.format(framework="torch"), "uses_torch": TORCH},
        """
        warnings.simplefilter("error")
        import torch
        import numpy_only, uses_torch

        table = torch.arange(400_000.0)  # captured
        net = torch.nn.Linear(2, 2)  # of the training, not of the function

        class Numbers(torch.utils.data.Dataset[np.ndarray]):
            def __init__(self):
                self.x = np.arange(0.0, 16.0, 2)
            def __len__(self):
                return len(self.x)
            def __getitem__(self, i) -> torch.Tensor | np.ndarray:
                return self.x[[i, i]]

        def of_script(i): return np.full(2, i * 2.0)
        def with_torch(i): return table[[2 * i, 2 * i]]

        (torch.ones(500, 500) @ torch.ones(500, 500)).sum()  # the trainer has torch's threads by now
        show("module", numpy_only.load)
        show("script", of_script)
        show("dataset", source=Numbers())
        show("module with torch", uses_torch.load)
        show("script with torch", with_torch)
        torch.save({name: value for name, value in net.state_dict().items()}, os.devnull)
        """,
    )
    assert lines == [
        f"module {BATCHES} fork []",
        f"script {BATCHES} fork []",
        f"dataset {BATCHES} fork []",
        f"module with torch {BATCHES} fork ['libtorch_cpu']",
        f"script with torch {BATCHES} fork ['libtorch_cpu']",
    ]
    assert errors == ""


@pytest.mark.slow
@needs("jax")
def test_a_training_of_jax_forks_workers_unless_a_jax_array_is_made_beforehand(
    tmp_path: Path,
) -> None:
    lines, errors = shown(
        tmp_path,
        {
            "numpy_only": NUMPY_ONLY.format(framework="jax"),
            "uses_jax": JAX,
            "on_import": JAX_ON_IMPORT,
        },
        """
        warnings.simplefilter("error")
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax, jax.numpy as jnp
        import numpy_only, uses_jax

        table = jnp.arange(400_000.0)  # JAX's threads run, and its warning of forks is armed

        def captured(i): return table[2 * i] + np.zeros(2)

        show("module", numpy_only.load)
        show("module with jax", uses_jax.load)
        jax.config.update("jax_enable_x64", True)
        show("64 bits", lambda i: uses_jax.load(i).dtype.name, source=range(4))
        jax.config.update("jax_enable_x64", False)
        warnings.simplefilter("always")  # both warnings have one text and one line
        import on_import
        show("on import", on_import.load)
        show("captured", captured)
        """,
    )
    assert lines == [
        f"module {BATCHES} fork []",
        f"module with jax {BATCHES} fork ['libjax_common']",
        f"64 bits {[['float64'] * 4]} fork ['libjax_common']",
        f"on import {BATCHES} exec ['libjax_common']",
        f"captured {BATCHES} exec ['libjax_common']",
    ]
    assert "os.fork" not in errors
    assert errors.count("LoaderpoolWarning") == 2
    assert errors.count("because of the runtime of JAX") == 2
    assert "capture NumPy arrays instead of tensors" in errors


def test_workers_see_no_accelerator_of_the_trainers(tmp_path: Path) -> None:
    child = run_child(
        """
        import os
        os.environ["JAX_PLATFORMS"] = "tpu,cuda"
        import loaderpool as lp
        with lp.Loader(range(2), lambda i: os.environ["JAX_PLATFORMS"], batch_size=2, workers=1) as loader:
            print(list(loader)[0].tolist(), os.environ["JAX_PLATFORMS"])
        """
    ).check()
    assert child.stdout == "['cpu', 'cpu'] tpu,cuda\n"


@pytest.mark.slow
@needs("torch")
def test_tensors_become_arrays_or_say_why_not(tmp_path: Path) -> None:
    lines, errors = shown(
        tmp_path,
        {},
        """
        import torch
        def full(i, **settings): return torch.full((2,), float(i), **settings)
        makers = dict(
            plain=lambda i: full(i),
            numbers=lambda i: torch.tensor(i),
            strided=lambda i: torch.arange(4)[::2] + i,
            listed=lambda i: [full(i), full(i)],
            bfloat16=lambda i: full(i, dtype=torch.bfloat16),
            float8=lambda i: torch.arange(6).to(torch.float8_e5m2)[i::3],
            bfloats=lambda i: [full(i, dtype=torch.bfloat16), full(i, dtype=torch.bfloat16)],
            one=lambda i: torch.tensor(i).to(torch.float8_e4m3fn),
            far=lambda i: full(i, dtype=torch.bfloat16, device="meta"),
            conjugate=lambda i: (full(i, dtype=torch.complex64) * 1j).conj(),
            grad=lambda i: full(i, requires_grad=True),
            elsewhere=lambda i: full(i, device="meta"),
            sparse=lambda i: full(i).to_sparse(),
        )
        for name, fn in makers.items():
            try:
                with lp.Loader(range(3), fn, batch_size=2, workers=0) as loader:
                    batches = list(loader)
                print(name, batches[0].dtype, batches[0].shape, batches[0][1].ravel()[0], len(batches[1]))
            except lp.SpecMismatchError as error:
                print(name, str(error).splitlines()[0])
        show("workers", lambda i: makers["plain"](2 * i))
        """,
    )
    for name, cure in (
        ("far", "meta"),
        ("conjugate", "resolve_conj()"),
        ("grad", "detach()"),
        ("elsewhere", "cpu()"),
        ("sparse", "to_dense()"),
    ):
        line = next(line for line in lines if line.startswith(name))
        assert line.startswith(
            f"{name} the element: an object of type Tensor cannot be converted to an array ("
        ), line
        assert cure in line  # part of torch's own message
        lines.remove(line)
    assert lines == [
        "plain float32 (2, 2) 1.0 1",
        "numbers int64 (2,) 1 1",
        "strided int64 (2, 2) 1 1",
        "listed float32 (2, 2, 2) 1.0 1",
        "bfloat16 bfloat16 (2, 2) 1 1",
        "float8 float8_e5m2 (2, 2) 1 1",
        "bfloats bfloat16 (2, 2, 2) 1 1",
        "one float8_e4m3fn (2,) 1 1",
        f"workers {BATCHES} fork ['libtorch_cpu']",
    ]
    assert errors == ""


@pytest.mark.slow
@needs("torch")
def test_what_torchs_generator_gives_belongs_to_the_sample(tmp_path: Path) -> None:
    """As for `random` and `numpy.random`. Otherwise all forks would start with the same state, and
    augment alike.
    """
    script = """
    import loaderpool as lp

    def load(i):
        import torch
        return torch.rand(3) + torch.randn(3)

    def read(workers, **settings):
        with lp.Loader(range(40), load, batch_size=4, shuffle=True, seed=3, workers=workers, **settings) as loader:
            return [batch.tolist() for _ in range(2) for batch in loader]

    here = read(0)
    assert here == read(1) == read(3)
    rows = [tuple(row) for batch in here for row in batch]
    assert len(set(rows)) == len(rows) == 80
    import torch
    torch.manual_seed(5)
    before = torch.default_generator.get_state()
    read(0)
    assert torch.equal(before, torch.default_generator.get_state())
    print("same")
    """
    lines, _ = shown(tmp_path, {}, script)
    assert lines == ["same"]


@needs("torch")
def test_the_shard_is_that_of_the_process_group(tmp_path: Path) -> None:
    code = f"""
        import os, torch.distributed as distributed
        import loaderpool as lp
        os.environ["TORCHELASTIC_RUN_ID"], os.environ["WORLD_SIZE"] = "1", "2"
        try:
            lp.Loader(range(40), batch_size=4, workers=0, shard="auto")
        except lp.ArgumentError as error:
            assert "Call torch.distributed.init_process_group()" in str(error)
        else:
            raise AssertionError("both ranks would have all rows")
        rank = 0 if os.fork() else 1
        distributed.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=rank, world_size=2)
        with lp.Loader(range(40), batch_size=4, workers=0, shard="auto") as loader:
            rows = [int(row) for batch in loader.as_torch() for row in batch]
        with lp.Loader(range(40), batch_size=4, workers=0, shard=lp.Shard(2, rank)) as loader:
            assert rows == [int(row) for batch in loader for row in batch] and len(rows) == 20
        distributed.destroy_process_group()
        if rank:
            os._exit(0)
        assert os.wait()[1] == 0
    """
    run_child(textwrap.dedent(code)).check()


@needs("torch")
@needs("jax")
def test_devices_that_are_not_there_are_refused_in_the_callers_line(tmp_path: Path) -> None:
    lines, _ = shown(
        tmp_path,
        {},
        """
        loader = lp.Loader(range(4), workers=0)
        for view, device in ((loader.as_torch, "cudaa"), (loader.as_torch, "cuda:99"), (loader.as_jax, "gpu")):
            try:
                view(device)
            except lp.ArgumentError as error:
                print(error)
        """,
    )
    torch, far, jax = lines
    assert torch.startswith(
        "device must be a device that PyTorch has here, such as \"cpu\", got 'cudaa': "
    )
    assert far.startswith(
        "device must be a device that PyTorch has here, such as \"cpu\", got 'cuda:99': "
    )
    assert jax == "sharding must be a jax.sharding.Sharding or a jax.Device, got 'gpu'"


@pytest.mark.parametrize("first", [0, 40], ids=["always", "later"])
@pytest.mark.parametrize("seed_globals", ["auto", True])
def test_batches_are_the_same_if_the_function_imports_torch_itself(
    seed_globals: object, first: int
) -> None:
    """The first call in a process draws from torch before its generator could be seeded."""
    outputs = {
        run_child(f"""
            import random, sys
            import loaderpool as lp

            def draw(index):
                number = random.random()
                if index < {first}:
                    return number
                import torch
                return number + torch.rand(1, dtype=torch.float64).item()

            with lp.Loader(
                range(64), draw, batch_size=4, workers={workers}, seed_globals={seed_globals!r}
            ) as loader:
                assert "torch" not in sys.modules
                print([batch.tolist() for batch in loader])
        """)
        .check()
        .stdout
        for workers in (0, 1, 2)
    }
    assert len(outputs) == 1


def test_replay_returns_the_sample_of_a_function_that_imports_torch_itself() -> None:
    run_child("""
        import random, sys
        import loaderpool as lp

        def draw(index):
            import torch
            return random.random() + torch.rand(1, dtype=torch.float64).item()

        with lp.Loader(range(8), draw, batch_size=8, workers=1, seed_globals=True) as loader:
            (batch,) = loader
            assert "torch" not in sys.modules
            assert lp.replay(loader, 5, epoch=0) == batch[5]
    """).check()


@pytest.mark.parametrize("seed_globals", ["auto", True])
def test_generators_that_draw_from_torch_have_the_same_items_for_any_number_of_workers(
    seed_globals: object,
) -> None:
    """Also if the generator imports torch, and whatever state the main process has."""
    outputs = {
        run_child(f"""
            import random
            import loaderpool as lp
            {before}

            def draw(shard):
                for number in range(6):
                    if number < {first}:
                        yield random.random(), 0.0
                    else:
                        import torch
                        yield random.random(), torch.rand(1, dtype=torch.float64).item()

            with lp.Loader.from_generator(
                draw, shards=range(3), batch_size=2, workers={workers},
                seed_globals={seed_globals!r},
            ) as loader:
                columns = zip(*[[each.tolist() for each in batch] for batch in loader])
                print([sum(column, []) for column in columns])
        """)
        .check()
        .stdout
        for workers, before, first in [
            (0, "import torch; torch.manual_seed(1)", 3),
            (1, "import torch; torch.manual_seed(2)", 3),
            (0, "", 3),
            (2, "", 3),
        ]
    }
    assert len(outputs) == 1
    numbers = [each for column in ast.literal_eval(outputs.pop()) for each in column if each]
    assert len({*numbers}) == len(numbers), "no generator has the numbers of another one"
