"""Text: tokenizers and documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from libraries_cases.arrays import OPEN_IN_SETUP
from libraries_cases.case import Trial, case, handle, refused, works

WORDS = [
    "data",
    "loaders",
    "read",
    "rows",
    "in",
    "many",
    "workers",
    "and",
    "keep",
    "the",
    "order",
    "of",
    "all",
    "batches",
]
TEXTS = [" ".join(np.random.default_rng(item).choice(WORDS, 12)) for item in range(24)]


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["[UNK]", "[PAD]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@case("tokenizers", "tokenizers", "`Tokenizer`, also after use", works)
def tokenizers_tokenizer(place: Path) -> Trial:
    tokenizer = word_tokenizer()
    tokenizer.encode_batch(TEXTS)  # starts the library's threads in this process
    return Trial(lambda item: np.array(tokenizer.encode(TEXTS[item]).ids))


@case("Transformers", "transformers", "tokenizers", works)
def transformers_tokenizer(place: Path) -> Trial:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(), pad_token="[PAD]", unk_token="[UNK]"
    )

    def encode(item: int) -> Any:
        return tokenizer(TEXTS[item], padding="max_length", max_length=16, return_tensors="np")[
            "input_ids"
        ][0]

    return Trial(encode)


@case("Transformers", "transformers", "image processors, feature extractors", works)
def transformers_processor(place: Path) -> Trial:
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 16, "width": 16})

    def prepare(item: int) -> Any:
        pixels = np.random.default_rng(item).integers(0, 256, (32, 32, 3), np.uint8)
        return np.asarray(processor(pixels, return_tensors="np")["pixel_values"][0])

    return Trial(prepare)


@case("tiktoken", "tiktoken", "`Encoding`", works)
def tiktoken_encoding(place: Path) -> Trial:
    import tiktoken

    ranks = {bytes([number]): number for number in range(256)}
    encoding = tiktoken.Encoding(
        "bytes", pat_str=r"\w+|\W", mergeable_ranks=ranks, special_tokens={}
    )
    return Trial(lambda item: np.array(encoding.encode(TEXTS[item])[:40]))


@case("SentencePiece", "sentencepiece", "`SentencePieceProcessor`", works)
def sentencepiece_processor(place: Path) -> Trial:
    import sentencepiece

    (place / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(place / "texts.txt"),
        model_prefix=str(place / "model"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(place / "model.model"))
    return Trial(lambda item: np.array(processor.encode(TEXTS[item])[:12]))


@case("spaCy", "spacy", "`Language`", works)
def spacy_language(place: Path) -> Trial:
    import spacy

    language = spacy.blank("en")
    return Trial(lambda item: np.array([len(token) for token in language(TEXTS[item])]))


@case("pypdfium2", "pypdfium2", "`PdfDocument`", refused, OPEN_IN_SETUP)
def pypdfium2_document(place: Path) -> Trial:
    import pypdfium2

    path = str(place / "pages.pdf")
    document = pypdfium2.PdfDocument.new()
    for item in range(24):
        document.new_page(100 + item, 50)
    document.save(path)
    return handle(
        lambda: pypdfium2.PdfDocument(path),
        lambda opened, item: np.array(opened[item].get_size()),
    )
