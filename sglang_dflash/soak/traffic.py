"""Random requests: valid ones of every kind, and malformed ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 999}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
)
_GRAMMARS: tuple[dict[str, str], ...] = (
    {"regex": "[^#]{3,80}#### [0-9]{1,2}"},
    {"ebnf": 'root ::= [^#]+ "#### " [0-9]'},
    {"json_schema": _SCHEMA},
)


@dataclass(frozen=True)
class Traffic:
    """A request to be sent.

    Attributes:
        body: of `/generate`, or raw bytes.
        ending: "whole", "disconnect" (the client leaves a stream), "abort" (by request id), or
            "refused" (a 4xx with a sentence must come).
        parity: whether plain decoding must give the same tokens.
    """

    body: dict[str, Any] | bytes
    ending: str = "whole"
    parity: bool = False


class Mix:
    """Draws requests.

    Args:
        prompts: token ids of texts that the model knows.
        context_len: of the model.
        vocab_size: ids below it are valid.
    """

    def __init__(
        self, seed: int, prompts: list[list[int]], context_len: int, vocab_size: int
    ) -> None:
        self.random = random.Random(seed)
        self.prompts, self.context_len, self.vocab_size = prompts, context_len, vocab_size

    def request(self, malformed: float) -> Traffic:
        """Malformed with the given probability, else one in ten is left or aborted."""
        draw = self.random.random()
        if draw < malformed:
            return self.malformed()
        if draw < malformed + 0.2:
            return self.parity()
        return self.valid(self.random.choices(("whole", "disconnect", "abort"), (18, 1, 1))[0])

    def parity(self) -> Traffic:
        """A greedy request whose answer is known from plain decoding."""
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": self.random.choice((1, 17, 60)),
        }
        if self.random.random() < 0.3:
            sampling["stop"] = [self.random.choice(("=", ".\n", "day", ">>"))]
        return Traffic(
            {"input_ids": self.random.choice(self.prompts[:40]), "sampling_params": sampling},
            parity=True,
        )

    def valid(self, ending: str) -> Traffic:
        """All parameters mixed."""
        pick = self.random
        prompt = self._prompt()
        room = self.context_len - len(prompt) - 1
        limit = max(1, min(room, pick.choice((1, 2, 8, 16, 17, 40, 120))))
        sampling = {"max_new_tokens": limit} | self._sampling(limit)
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling}
        if pick.random() < 0.2:
            body |= {"return_logprob": True, "top_logprobs_num": pick.choice((0, 3))}
            body["logprob_start_len"] = pick.choice((-1, 0, len(prompt) - 1))
        if ending != "whole":
            sampling["max_new_tokens"], sampling["ignore_eos"] = max(1, min(room, 300)), True
            sampling.pop("min_new_tokens", None)
            body["rid"] = f"soak-{pick.getrandbits(64):x}"
        elif pick.random() < 0.1:
            sampling["n"] = 2
        body["stream"] = ending == "disconnect" or (pick.random() < 0.3 and "n" not in sampling)
        return Traffic(body, ending)

    def _prompt(self) -> list[int]:
        """From one token to the context's limit; half of them share a prefix with others."""
        pick = self.random
        text = list(pick.choice(self.prompts))
        kind = pick.random()
        if kind < 0.1:
            return text[:1]
        if kind < 0.5:
            return self.prompts[0][: pick.randrange(1, len(self.prompts[0]))] + text
        if kind < 0.55:
            while len(text) < self.context_len - 20:
                text += pick.choice(self.prompts)
            return text[: self.context_len - pick.choice((20, 40))]
        return text

    def _sampling(self, limit: int) -> dict[str, Any]:
        pick = self.random
        rare: dict[str, Callable[[], Any]] = {
            "top_p": lambda: pick.uniform(0.1, 1),
            "top_k": lambda: pick.choice((1, 5, 50)),
            "min_p": lambda: pick.uniform(0, 0.5),
            "frequency_penalty": lambda: pick.uniform(-2, 2),
            "presence_penalty": lambda: pick.uniform(-2, 2),
            "repetition_penalty": lambda: pick.uniform(0.5, 2),
            "min_new_tokens": lambda: pick.randrange(limit + 1),
            "logit_bias": lambda: {str(pick.randrange(self.vocab_size)): pick.uniform(-9, 9)},
            "stop": lambda: pick.choice(("=", ["day", "."], "never said")),
            "stop_token_ids": lambda: [pick.randrange(self.vocab_size)],
            "stop_regex": lambda: r"\d\d",
            "ignore_eos": lambda: True,
            "skip_special_tokens": lambda: False,
        }
        chosen = {name: draw() for name, draw in rare.items() if pick.random() < 0.12}
        if pick.random() < 0.12:
            chosen |= pick.choice(_GRAMMARS)
            # A grammar that allows only the end, before the minimum: such a request is aborted.
            chosen.pop("min_new_tokens", None)
        return {"temperature": pick.choice((0, 0, 0.7, 1.5))} | chosen

    def malformed(self) -> Traffic:
        """One thing wrong with a request that would be served."""
        prompt = self.random.choice(self.prompts)
        raw = self.random.random() < 0.1
        if raw:
            return Traffic(self.random.choice(RAW), "refused")
        name, value = self.random.choice(WRONG_SAMPLING + WRONG_FIELDS)
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8}}
        if (name, value) in WRONG_SAMPLING:
            body["sampling_params"][name] = value
        else:
            body |= {"return_logprob": True, name: value}
        return Traffic(body, "refused")


RAW = (b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe")
WRONG_SAMPLING: tuple[tuple[str, Any], ...] = (
    *(("temperature", value) for value in (-1, "hot", None, [1])),
    *(("top_p", value) for value in (0, 2.0, "x")),
    *(("top_k", value) for value in (-5, 0, 2.5, "x")),
    *(("min_p", value) for value in (2, -1, "x")),
    *(("max_new_tokens", value) for value in (-1, 10**9, 3.5, "x")),
    *(("min_new_tokens", value) for value in (-1, 100, "x")),
    *(("frequency_penalty", value) for value in (5, "x")),
    *(("presence_penalty", value) for value in (-5, "x")),
    *(("repetition_penalty", value) for value in (0, 3, "x")),
    *(("n", value) for value in (0, -1, "x")),
    *(("stop", value) for value in (5, [5])),
    *(("stop_token_ids", value) for value in ("x", ["x"], 5)),
    *(("stop_regex", value) for value in ("(", 5)),
    *(("logit_bias", value) for value in ({"99999999": 1.0}, {"x": 1.0}, {"5": "x"}, [1])),
    *(("regex", value) for value in ("(", 5)),
    *(("json_schema", value) for value in ("{", '{"type": 5}', 5)),
    *(("ebnf", value) for value in ("root ::=", 5)),
    *(("structural_tag", value) for value in ("{", '{"x": 1}')),
    *(("sampling_seed", value) for value in ("x", -1)),
    *(("custom_params", value) for value in ("x", 5)),
    ("ignore_eos", "x"),
    ("foo", 1),
)
WRONG_FIELDS: tuple[tuple[str, Any], ...] = (
    ("input_ids", []),
    ("input_ids", [10**7]),
    ("input_ids", [-5]),
    ("input_ids", ["a"]),
    ("input_ids", [5] * 50_000),
    ("input_ids", None),
    ("sampling_params", "x"),
    ("sampling_params", [{}, {}]),
    ("rid", 5),
    ("return_logprob", "x"),
    ("logprob_start_len", -5),
    ("logprob_start_len", 10**6),
    ("top_logprobs_num", -1),
    ("top_logprobs_num", 10**7),
    ("token_ids_logprob", [10**7]),
    ("token_ids_logprob", [-(10**7)]),
    ("session_params", {"id": "nobody"}),
    ("image_data", ["picture.png"]),
    ("priority", "x"),
    ("stream", "maybe"),
)
