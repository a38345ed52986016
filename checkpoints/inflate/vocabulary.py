"""A large vocabulary's tokenizer: the small one's, and a text for each token that it lacks."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

# What new tokens consist of, as a byte-level vocabulary writes it: known tokens of words, or signs.
_WORDS = frozenset(string.ascii_letters + string.digits + "Ġ")
_SIGNS = sorted({*string.punctuation, "Ġ", "Ċ"})
# Share of tokens of signs. One in a hundred tokens then has a quotation mark, as in Qwen3's vocabulary: these
# cost most in a JSON schema's masks.
_OF_SIGNS = 0.17


def widen_tokenizer(file: Path, first: int, size: int, seed: int) -> None:
    """Gives the tokens `first` to `size` - 1 texts in a tokenizer.json.

    Tokens without texts are special to xgrammar, which goes through such tokens one by one for each mask and
    each token that it accepts. Of 150,000 that is 50 times what the vocabulary of a large model costs. Nothing
    merges to the new ones, so text is encoded as before. Tokenizers that are not byte-level BPE, or that do not need
    merges to encode a text that they know, stay as they are.
    """
    tokenizer = json.loads(file.read_text())
    model, decoder = tokenizer["model"], tokenizer["decoder"] or {}
    if model["type"] != "BPE" or decoder.get("type") != "ByteLevel" or model.get("ignore_merges"):
        return
    vocab = model["vocab"]
    added = {token["content"] for token in tokenizer["added_tokens"]}
    words = [text for text in vocab if text not in added and _WORDS.issuperset(text)]
    draw = random.Random(seed)
    for token in range(first, size):
        text = next(iter(vocab))
        while text in vocab:
            pieces = _SIGNS if draw.random() < _OF_SIGNS else words
            text = "".join(draw.choices(pieces, k=draw.choice((2, 2, 3, 4))))
        vocab[text] = token
    file.write_text(json.dumps(tokenizer, ensure_ascii=False))
