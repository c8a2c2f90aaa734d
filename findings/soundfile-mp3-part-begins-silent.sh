#!/usr/bin/env bash
# soundfile 0.14.0 with its libsndfile 1.2.2: a part of an MP3 file that is read with `start=`
# begins with silence, where the file has none.
#
# Expected: the frames that reading the whole file gives there, as with FLAC, Opus and an MP3 file
# of a higher, constant bit rate.
# Seen: a tone is written with the default settings. Every part begins with 1300 to 2400 frames of
# exact zeros (30 to 54 ms at 44.1 kHz) and is right only about 900 frames later. There is no
# warning, and tell() is right. The same after seek() in an open file. MP3 frames may need data of
# earlier ones, and at a low bit rate of more of them than the decoder reads before it starts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check numpy==2.4.6 \
    soundfile==0.14.0
cd "$folder"
"$folder/venv/bin/python" - <<'CODE'
import numpy as np
import soundfile

assert soundfile.__libsndfile_version__ == "1.2.2"


def parts(path):
    """Return for each part: leading zeros, and frames until it equals the whole file's."""
    whole, rate = soundfile.read(path)
    found = []
    for start in range(rate, 4 * rate, rate // 3):
        part, _ = soundfile.read(path, start=start, frames=8000)
        with soundfile.SoundFile(path) as opened:
            opened.seek(start)
            assert opened.tell() == start
            assert np.array_equal(opened.read(8000), part)
        wrong = np.flatnonzero(np.abs(part - whole[start : start + 8000]) > 1e-4)
        found.append((int(np.flatnonzero(part)[0]), int(wrong[-1]) + 1 if len(wrong) else 0))
        assert not np.any(np.all(whole[start : start + 8000].reshape(-1, 100) == 0, axis=1))
    return found


def tone(rate):
    return 0.3 * np.sin(2 * np.pi * 440 * np.arange(5 * rate) / rate)


soundfile.write("variable.mp3", tone(44100), 44100)
soundfile.write("constant.mp3", tone(44100), 44100, bitrate_mode="CONSTANT", compression_level=0.5)
soundfile.write("tone.flac", tone(44100), 44100)
soundfile.write("tone.opus", tone(48000), 48000, format="OGG", subtype="OPUS")
seen = parts("variable.mp3")
print("zeros and frames until it is right:", seen)
assert all(zeros > 1000 and right > zeros + 500 for zeros, right in seen)
for path in ("constant.mp3", "tone.flac", "tone.opus"):
    assert {right for zeros, right in parts(path)} == {0}, path
CODE
