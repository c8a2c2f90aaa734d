"""Sound and signals."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np

from libraries_cases.arrays import OPEN_IN_SETUP
from libraries_cases.case import (
    Trial,
    case,
    handle,
    module_in,
    opened_in_setup,
    refused,
    works,
)

RATE = 8000
SAMPLES = 200  # length of each of the 24 pieces


def sound() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).uniform(-0.9, 0.9, 24 * SAMPLES).astype(np.float32)


def sound_file(place: Path) -> str:
    path = str(place / "sound.wav")
    with wave.open(path, "w") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((sound() * 32767).astype("<i2").tobytes())
    return path


@case("soundfile", "soundfile", "`SoundFile`, `blocks`", refused, OPEN_IN_SETUP)
def soundfile_file(place: Path) -> Trial:
    import soundfile

    path = sound_file(place)

    def read(file: Any, item: int) -> np.ndarray[Any, Any]:
        file.seek(item * SAMPLES)
        return np.asarray(file.read(SAMPLES))

    blocks = soundfile.SoundFile(path).blocks(SAMPLES)
    return handle(lambda: soundfile.SoundFile(path), read, alike=[blocks])


@case("soundfile", "soundfile", "`SoundFile` that a module opens on import", works)
def soundfile_on_import(place: Path) -> Trial:
    module = module_in(
        place,
        """
        import soundfile
        opened = soundfile.SoundFile({path})
        def read(item):
            opened.seek(item % 24 * 200)
            return opened.read(200)
        """,
        path=sound_file(place),
    )
    return Trial(module.read, range(3000))


@case("wave", "", "`Wave_read`", refused, OPEN_IN_SETUP)
def wave_file(place: Path) -> Trial:
    path = sound_file(place)

    def read(file: Any, item: int) -> np.ndarray[Any, Any]:
        file.setpos(item * SAMPLES)
        return np.frombuffer(file.readframes(SAMPLES), "<i2")

    return handle(lambda: wave.open(path), read)


@case("librosa", "librosa", "functions", works)
def librosa_functions(place: Path) -> Trial:
    import librosa

    pieces = sound().reshape(24, SAMPLES)
    return Trial(
        lambda item: librosa.feature.melspectrogram(
            y=pieces[item], sr=RATE, n_fft=64, hop_length=32, n_mels=8
        )
    )


@case("audiomentations", "audiomentations", "`Compose`: [random](#randomness)", works)
def audiomentations_compose(place: Path) -> Trial:
    from audiomentations import AddGaussianNoise, Compose, Gain

    transform = Compose([AddGaussianNoise(p=1.0), Gain(p=1.0)])
    pieces = sound().reshape(24, SAMPLES)
    return Trial(lambda item: transform(pieces[item], RATE), is_random=True)


@case("pydub", "pydub", "`AudioSegment`", works)
def pydub_segment(place: Path) -> Trial:
    from pydub import AudioSegment

    segment = AudioSegment.from_wav(sound_file(place))
    length_ms = SAMPLES * 1000 // RATE
    return Trial(
        lambda item: np.array(
            segment[item * length_ms : (item + 1) * length_ms].get_array_of_samples()
        )
    )


@case("pyEDFlib", "pyEDFlib", "`EdfReader`", refused, OPEN_IN_SETUP)
def pyedflib_reader(place: Path) -> Trial:
    import pyedflib

    header = pyedflib.highlevel.make_signal_header("signal", sample_frequency=SAMPLES)
    paths = [str(place / f"{name}.edf") for name in ("captured", "cure")]
    for path in paths:  # a process can open a file once
        pyedflib.highlevel.write_edf(path, [sound().astype(np.float64)], [header])

    def read(reader: Any, item: int) -> np.ndarray[Any, Any]:
        return np.asarray(reader.readSignal(0, item * SAMPLES, SAMPLES))

    trial = handle(lambda: pyedflib.EdfReader(paths[0]), read)
    trial.cure = opened_in_setup(lambda: pyedflib.EdfReader(paths[1]), read)
    return trial


@case("WFDB", "wfdb", "`Record`", works)
def wfdb_record(place: Path) -> Trial:
    import wfdb

    signal = sound().astype(np.float64)[:, None]
    wfdb.wrsamp(
        "signal",
        fs=RATE,
        units=["mV"],
        sig_name=["a"],
        p_signal=signal,
        fmt=["16"],
        write_dir=str(place),
    )
    record = wfdb.rdrecord(str(place / "signal"))
    return Trial(lambda item: record.p_signal[item * SAMPLES : (item + 1) * SAMPLES])


def raw_of_mne() -> Any:
    import mne

    info = mne.create_info(["a", "b"], sfreq=100.0)
    data = np.random.default_rng(0).normal(size=(2, 2400))
    return mne.io.RawArray(data, info, verbose="error")


def epochs_of_mne() -> Any:
    import mne

    events = np.array([[item * 100, 0, 1] for item in range(24)])
    settings = {"tmin": 0, "tmax": 0.89, "baseline": None, "preload": True, "verbose": "error"}
    return mne.Epochs(raw_of_mne(), events, **settings)


@case("MNE", "mne", "`Raw`, `Epochs`", works)
def mne_raw(place: Path) -> Trial:
    raw = raw_of_mne()
    epochs = epochs_of_mne()

    def read(item: int) -> Any:
        piece = raw.get_data(start=item * 100, stop=item * 100 + 90)
        return piece, epochs.get_data(item=[item])[0]

    return Trial(read)


@case("MNE", "mne", "`Epochs` as the source", works)
def mne_epochs(place: Path) -> Trial:
    def read(epoch: Any) -> Any:
        return epoch.get_data()[0]

    return Trial(read, epochs_of_mne())
