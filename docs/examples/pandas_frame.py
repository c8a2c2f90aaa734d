"""Train on a pandas DataFrame: pass it to the loader as it is.

A row arrives in the function as a dict of column names to values. All workers share one copy of the numbers.
Install, in a clone: pip install . pandas
"""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import loaderpool as lp

COLORS = ["blue", "green", "red"]


def write_table(path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"size": rng.random(1000), "color": rng.choice(COLORS, 1000)})
    frame["price"] = 2 * frame["size"] + frame["color"].map(
        {"blue": 1.0, "green": -1.0, "red": 0.0}
    )
    frame.to_csv(path, index=False)


def features(row):
    x = np.zeros(1 + len(COLORS), np.float32)
    x[0] = row["size"]
    x[1 + COLORS.index(row["color"])] = 1
    return x, np.float32(row["price"])


weights = np.zeros(1 + len(COLORS), np.float32)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "prices.csv")
    write_table(path)
    frame = pd.read_csv(path)
    with lp.Loader(frame, features, batch_size=50, shuffle=True, workers=2) as loader:
        for _ in range(20):
            for x, price in loader:
                weights -= x.T @ (x @ weights - price) / len(price)

named = dict(zip(["size", *COLORS], weights.round(2).tolist(), strict=True))
print(f"weights after 20 epochs: {named}")
assert np.allclose(weights, [2, 1, -1, 0], atol=0.01)
