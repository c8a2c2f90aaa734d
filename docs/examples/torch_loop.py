"""Train a PyTorch module in a plain loop over `loader.as_torch()`, without a `DataLoader`.

Batches are copied to the GPU ahead of time if there is one. On the CPU they are not copied.
Install, in a clone: pip install . torch pillow
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import loaderpool as lp


def write_images(folder):
    rng = np.random.default_rng(0)
    items = []
    for number in range(240):
        label = number % 2
        pixels = rng.integers(0, 120, (40, 50, 3), np.uint8)
        pixels[:, :, 0 if label else 2] += 100  # label 1 is red, label 0 is blue
        path = Path(folder, f"{number:03d}.png")
        Image.fromarray(pixels).save(path)
        items.append((path, label))
    return items


def load(item, rng):
    path, label = item
    with Image.open(path) as image:
        pixels = np.asarray(image.resize((32, 32)), np.float32) / 255
    if rng.random() < 0.5:
        pixels = pixels[:, ::-1]
    return pixels.transpose(2, 0, 1), label  # PyTorch wants the channels first


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2)).to(device)
optimizer = torch.optim.Adam(model.parameters())

with (
    tempfile.TemporaryDirectory() as folder,
    lp.Loader(write_images(folder), load, batch_size=24, shuffle=True, workers=2) as loader,
):
    for _ in range(5):
        right = 0
        for images, labels in loader.as_torch(device=device):
            scores = model(images)
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += int((scores.argmax(1) == labels).sum())

accuracy = right / 240
print(f"accuracy in the last of 5 epochs on {device}: {accuracy:.1%}")
assert accuracy > 0.95
