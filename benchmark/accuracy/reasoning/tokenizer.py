"""The task's tokenizer in Hugging Face format: one id for each word of ``task.VOCABULARY``, words split at spaces."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmark.accuracy.reasoning.task import EOS, PAD, VOCABULARY

IDS = {token: index for index, token in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """The ids of ``text``; raises ``KeyError`` for a word outside the vocabulary. Same as ``build().encode``."""
    return [IDS[token] for token in text.split()]


def build() -> PreTrainedTokenizerFast:
    """The tokenizer; it adds nothing to a text. Decoding gives the words back with one space between them."""
    core = Tokenizer(models.WordLevel(IDS, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False, model_max_length=4096
    )
