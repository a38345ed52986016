"""Greedy decoding under a JSON schema, with the grammar library that the server uses."""

import json
from collections.abc import Sequence
from typing import Any

import torch
import xgrammar
from tokenizers import Tokenizer

from .decode import Decoded, prefill
from .target import Target
from .tokenizer import END_ID

Schema = dict[str, Any]


@torch.inference_mode()
def constrained(
    target: Target,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    schemas: Sequence[Schema],
    limit: int,
) -> list[Decoded]:
    """One answer a prompt, each of which keeps to its schema as far as it goes."""
    vocabulary = [tokenizer.id_to_token(i) for i in range(target.shape.vocab_size)]
    info = xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[END_ID], add_prefix_space=False
    )
    compiler = xgrammar.GrammarCompiler(info)
    matchers = [
        xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
        for schema in schemas
    ]
    mask = xgrammar.allocate_token_bitmask(len(prompts), len(vocabulary))
    state = prefill(target, prompts, room=limit)
    bits = torch.arange(32, device=state.start.device)
    rows = torch.arange(len(prompts), device=state.start.device)
    last = state.outputs[-1][rows, state.start - 1]
    results = [Decoded() for _ in prompts]
    for step in range(limit):
        for row, matcher in enumerate(matchers):
            if not matcher.is_terminated():
                matcher.fill_next_token_bitmask(mask, row)
        allowed = (mask.to(bits.device)[..., None] >> bits & 1).flatten(1)[:, : len(vocabulary)]
        logits = target.logits(last).masked_fill(allowed == 0, -torch.inf)
        tokens = logits.argmax(-1)
        for matcher, result, token in zip(matchers, results, tokens.tolist(), strict=True):
            if not matcher.is_terminated():
                matcher.accept_token(token)
                result.commit([token], limit)
        if all(matcher.is_terminated() for matcher in matchers):
            break
        positions = state.start[:, None] + step
        last = target(tokens[:, None], positions, state.cache)[-1][:, 0]
    return results
