"""`PrometheusCollector`: what Prometheus is told, read back by the client's own parser."""

from __future__ import annotations

import gc
import math
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.adapters.prometheus import PrometheusCollector

prometheus = pytest.importorskip("prometheus_client", reason="pip install 'loaderpool[prometheus]'")


def sample(item: int) -> Any:
    time.sleep(0.002)
    return np.full(4, item, np.float32)


def told_by(collector: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples by name and labels, out of the text."""
    from prometheus_client.parser import text_string_to_metric_families

    text = prometheus.generate_latest(collector).decode()
    return {
        (each.name, tuple(sorted(each.labels.items()))): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def of(told: dict[Any, float], name: str, loader: str = "train", **labels: str) -> float:
    return told[f"loaderpool_{name}", tuple(sorted({"loader": loader, **labels}.items()))]


def test_metrics_are_what_statistics_say() -> None:
    with (
        lp.Loader(range(640), sample, batch_size=16, workers=2) as train,
        lp.Loader(range(64), sample, batch_size=16, workers=0) as validation,
    ):
        assert len(list(train)) == 40
        assert len(list(validation)) == 4
        told = told_by(PrometheusCollector(train=train, validation=validation))
        seen = train.statistics()
    assert of(told, "batches_total") == seen.batches == 40
    assert of(told, "samples_total") == 640
    assert of(told, "bytes_total") == seen.bytes
    assert of(told, "steps_total") == 39
    assert of(told, "step_seconds_total") == pytest.approx(seen.steps.seconds)
    assert of(told, "step_wait_seconds_total") == pytest.approx(seen.steps.wait_s)
    assert of(told, "first_batch_seconds") == pytest.approx(seen.steps.first_batch_s)
    assert (of(told, "workers"), of(told, "slots")) == (2, seen.slots)
    assert (of(told, "batches_total", "validation"), of(told, "workers", "validation")) == (4, 0)
    assert told["loaderpool_build_info", (("version", lp.__version__),)] == 1


def test_calls_are_a_histogram() -> None:
    with lp.Loader(range(640), sample, batch_size=16, workers=1) as loader:
        list(loader)
        told = told_by(PrometheusCollector(train=loader))
        calls = loader.statistics().calls
    assert calls is not None
    assert of(told, "call_seconds_count") == calls.timed
    assert of(told, "call_seconds_sum") == pytest.approx(calls.timed * calls.mean_s)
    edges = sorted(
        (float(dict(labels)["le"]), value) for (name, labels), value in told.items() if name.endswith("_bucket")
    )
    counts = [value for _, value in edges]
    assert counts == sorted(counts) and edges[-1] == (math.inf, calls.timed)
    # What was made before the first batch was asked for takes no time when that is.
    assert all(value < 0.2 * calls.timed for edge, value in edges if edge < 0.002)
    assert len(edges) == len({edge for edge, _ in edges}) == 30


def test_what_was_not_measured_is_not_there() -> None:
    with lp.Loader(range(64), sample, batch_size=16, workers=0) as loader:
        told = told_by(PrometheusCollector(train=loader))
    names = {name for name, _ in told}
    assert "loaderpool_batches_total" in names
    assert not {"loaderpool_first_batch_seconds", "loaderpool_cpu_seconds_per_sample"} & names
    assert not any("call_seconds" in name for name in names)


def test_a_loader_is_not_kept_and_a_closed_one_is_told_of() -> None:
    loader = lp.Loader(range(64), sample, batch_size=16, workers=0)
    collector = PrometheusCollector(train=loader)
    list(loader)
    loader.close()
    assert of(told_by(collector), "batches_total") == 4
    del loader
    gc.collect()
    assert set(told_by(collector)) == {("loaderpool_build_info", (("version", lp.__version__),))}


def test_a_registry_refuses_a_second_one() -> None:
    registry = prometheus.CollectorRegistry()
    with lp.Loader(range(64), sample, batch_size=16, workers=0) as loader:
        registry.register(PrometheusCollector(train=loader))
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            registry.register(PrometheusCollector(validation=loader))
        assert told_by(registry)


def test_it_is_scraped_while_training_runs() -> None:
    registry = prometheus.CollectorRegistry()
    with lp.Loader(range(4000), sample, batch_size=16, workers=2) as loader:
        registry.register(PrometheusCollector(train=loader))
        server, thread = prometheus.start_http_server(0, addr="127.0.0.1", registry=registry)
        seen: list[float] = []

        def scrape() -> None:
            from prometheus_client.parser import text_string_to_metric_families

            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=20) as answer:
                text = answer.read().decode()
            families = {family.name: family for family in text_string_to_metric_families(text)}
            seen.append(families["loaderpool_batches"].samples[0].value)

        taken = 0
        scrapers: list[threading.Thread] = []
        for taken, _ in enumerate(loader, 1):
            if taken % 50 == 0:
                scrapers.append(threading.Thread(target=scrape))
                scrapers[-1].start()
        for each in scrapers:
            each.join()
        server.shutdown()
        server.server_close()
        thread.join()
    assert taken == 250
    assert len(seen) == 5 and all(50 <= value <= 250 for value in seen)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is not there")
def test_promtool_finds_nothing_to_say() -> None:
    with lp.Loader(range(640), sample, batch_size=16, workers=2) as loader:
        list(loader)
        text = prometheus.generate_latest(PrometheusCollector(train=loader))
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: PrometheusCollector(), lp.ArgumentError, "takes loaders by name"),
        (lambda: PrometheusCollector(lp.Loader(range(4), sample, batch_size=2)), lp.ArgumentError, "loaders by name"),
        (lambda: PrometheusCollector(train=[1]), lp.ArgumentTypeError, "train must be a Loader, got list"),
        (lambda: lp.PrometheusCollector, AttributeError, r"it is in loaderpool\.adapters\.prometheus"),
    ],
)
def test_it_takes_loaders_by_name(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "prometheus_client.core", raising=False)
    with (
        lp.Loader(range(64), sample, batch_size=16, workers=0) as loader,
        pytest.raises(ImportError, match=r"needs prometheus_client, .*pip install 'loaderpool\[prometheus\]'"),
    ):
        PrometheusCollector(train=loader)
