"""Train on a Hugging Face `datasets.Dataset`: pass it to the loader as it is.

A row arrives in the function as a dict. The dataset is memory-mapped, so the workers get its path, not its data.
Install, in a clone: pip install . datasets
"""

import tempfile

import numpy as np
from datasets import Dataset, load_from_disk

import loaderpool as lp

GOOD, BAD = ["great", "funny", "moving"], ["dull", "noisy", "endless"]
OTHER = ["the", "film", "was", "plot", "actors", "and", "music", "very"]
POSITIONS = {word: position for position, word in enumerate(GOOD + BAD + OTHER)}


def encode(row):
    counts = np.zeros(len(POSITIONS), np.float32)
    for word in row["text"].split():
        counts[POSITIONS[word]] += 1
    return counts, np.float32(row["label"])


def write_dataset(folder):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 640).tolist()
    texts = [
        " ".join([*rng.choice(OTHER, 6), rng.choice(GOOD if label else BAD)]) for label in labels
    ]
    Dataset.from_dict({"text": texts, "label": labels}).save_to_disk(folder)


weights = np.zeros(len(POSITIONS), np.float32)
with tempfile.TemporaryDirectory() as folder:
    write_dataset(folder)
    dataset = load_from_disk(folder)
    with lp.Loader(dataset, encode, batch_size=32, shuffle=True, workers=2) as loader:
        for _ in range(8):
            right = 0
            for counts, labels in loader:
                predicted = 1 / (1 + np.exp(-counts @ weights))
                weights -= 0.5 * counts.T @ (predicted - labels) / len(labels)
                right += int(((predicted > 0.5) == labels).sum())

accuracy = right / len(dataset)
print(f"accuracy in the last epoch: {accuracy:.1%}")
assert accuracy > 0.95
