"""The pair's tokenizer: byte-level BPE with single digits, ChatML specials and chat template."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 768
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
PAD_ID, START_ID, END_ID, MASK_ID = range(4)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from `texts`; the specials get ids 0-3."""
    tokenizer = Tokenizer(models.BPE())
    # Single digits let a number be read and written place by place.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        # Every byte has a token, so any prompt can be encoded.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def chat_prompt(question: str, system: str | None = None) -> str:
    """What the chat template makes of one question, up to where the answer begins."""
    before = f"<|im_start|>system\n{system}<|im_end|>\n" if system is not None else ""
    return f"{before}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and the tokenizer_config.json that transformers needs beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "eos_token": SPECIALS[END_ID],
        "pad_token": SPECIALS[PAD_ID],
        "mask_token": SPECIALS[MASK_ID],
        "additional_special_tokens": [SPECIALS[START_ID]],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
