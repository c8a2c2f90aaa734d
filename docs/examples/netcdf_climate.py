"""Train Keras to forecast a field of NetCDF files, from windows of time, and resume in the middle of an epoch.

Workers open the files themselves. The mean and deviation are those of the training years.
Install, in a clone: pip install ".[tensorflow-cpu]" xarray netCDF4
"""

import tempfile
from pathlib import Path

import keras
import numpy as np
import xarray

import loaderpool as lp

HOURS, WINDOW, YEARS = 240, 6, (2001, 2002, 2003)


def write_years(folder):
    """Write temperatures as packed integers, as archives do: a wave that moves east. Some cells are missing."""
    rng = np.random.default_rng(0)
    paths = []
    for year in YEARS:
        angles = 2 * np.pi * (np.arange(16) - np.arange(HOURS)[:, None]) / 16
        field = 280 + 10 * np.sin(angles)[:, None, :] + rng.normal(0, 0.5, (HOURS, 8, 16))
        field[::50, 0, 0] = np.nan
        times = np.datetime64(f"{year}-01-01", "ns") + np.arange(HOURS) * np.timedelta64(1, "h")
        dataset = xarray.Dataset(
            {"t2m": (("time", "lat", "lon"), field)}, {"time": times}, {"title": "made"}
        )
        packed = {
            "dtype": "int16",
            "scale_factor": 0.002,
            "add_offset": 280.0,
            "_FillValue": -32768,
        }
        path = Path(folder, f"{year}.nc")
        dataset.to_netcdf(
            path, encoding={"t2m": {**packed, "chunksizes": (WINDOW, 8, 16)}}, engine="netcdf4"
        )
        paths.append(path)
    return paths


def moments(year):
    field = years[year]["t2m"].values  # float64 with NaN where a value is missing
    return np.nanmean(field), np.nanmean(np.square(field))


def load(item):
    """Return a window, and the field an hour after it."""
    year, start = item
    field = years[year]["t2m"][start : start + WINDOW + 1].values
    field = np.nan_to_num((field - mean) / std).astype(np.float32)  # missing: the mean
    return field[:-1], field[-1]


def windows(some_years):
    """Windows do not cross the end of a year, so validation has no hour of the training."""
    return [(year, start) for year in some_years for start in range(HOURS - WINDOW)]


def make(items, workers, **settings):
    return lp.Loader(items, load, batch_size=32, workers=workers, **settings)


def batches_of(loader):
    with loader:
        return [(x.copy(), y.copy()) for x, y in loader]


def same(first, second):
    return len(first) == len(second) and all(map(np.array_equal, sum(first, ()), sum(second, ())))


keras.utils.set_random_seed(0)
with tempfile.TemporaryDirectory() as folder:
    paths = write_years(folder)
    years = {
        year: xarray.open_dataset(path, cache=False)
        for year, path in zip(YEARS, paths, strict=True)
    }
    with lp.Loader([2001, 2002], moments, batch_size=None, workers=2) as loader:
        mean, square = np.mean(list(loader), axis=0)
    mean, std = float(mean), float(np.sqrt(square - mean**2))
    assert abs(mean - 280) < 0.1 and abs(std - 7.1) < 0.1

    training, shuffled = windows([2001, 2002]), {"shuffle": True, "seed": 1}
    assert same(
        batches_of(make(training, 2, **shuffled)), batches_of(make(training, 0, **shuffled))
    )

    layers = [keras.layers.Flatten(), keras.layers.Dense(128), keras.layers.Reshape((8, 16))]
    model = keras.Sequential([keras.Input((WINDOW, 8, 16)), *layers])
    model.compile("adam", "mse")
    with (
        lp.Pool(workers=2) as pool,
        make(training, pool, **shuffled) as train,
        make(windows([2003]), pool) as valid,
    ):
        history = model.fit(
            train.for_keras(), validation_data=valid.for_keras(), epochs=4, verbose=0
        )
        unchanged = np.mean(
            [np.square(x[:, -1] - y).mean() for x, y in valid]
        )  # the forecast "no change"

        batches = iter(train)
        for _ in range(5):
            next(batches)
        state = batches.state_dict()
        rest = [(x.copy(), y.copy()) for x, y in batches]
    again = make(training, 1, **shuffled)
    again.load_state_dict(state)
    assert same(batches_of(again), rest)
    for dataset in years.values():
        dataset.close()

error = history.history["val_loss"][-1]
print(
    f"{len(training)} windows; squared error {error:.3f} in 2003, and {unchanged:.3f} of the last field"
)
assert error < unchanged / 2
