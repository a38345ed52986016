"""Sends requests of a mix and judges the answers."""

from __future__ import annotations

import json
import threading
from typing import Any

import requests

from sglang_dflash.soak.traffic import Traffic

TIMEOUT_S = 120


class Wrong(Exception):
    """An answer that must not be; the message says what was asked and what came."""


class Client:
    """Asks a server, and a server with plain decoding for what must be equal.

    Args:
        url: of the server.
        plain_url: of a server without speculation, or None.
    """

    def __init__(self, url: str, plain_url: str | None):
        self.url, self.plain_url = url, plain_url
        self._known: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def send(self, traffic: Traffic) -> str:
        """Sends a request and gives what became of it, in a word.

        Raises:
            Wrong: the answer is not what it must be.
        """
        if traffic.ending == "refused":
            return self._refused(traffic)
        assert isinstance(traffic.body, dict)
        if traffic.ending == "disconnect":
            return self._leave(traffic.body)
        if traffic.ending == "abort":
            return self._abort(traffic.body)
        answers = self._answers(self._post(traffic.body), traffic.body)
        for answer in answers:
            self._check(answer, traffic.body)
        if traffic.parity and self.plain_url:
            expected = self._plain(traffic.body)
            if answers[0]["output_ids"] != expected:
                raise Wrong(
                    f"{_short(traffic.body)} gave {answers[0]['output_ids']}, plain decoding {expected}"
                )
            return "equal"
        return "whole"

    def load(self) -> dict:
        """Requests and KV slots in use."""
        return requests.get(f"{self.url}/get_load", timeout=TIMEOUT_S).json()[0]

    def flush(self) -> bool:
        """Waits for a prompt that is run in chunks, which the load does not count."""
        flushed = requests.post(f"{self.url}/flush_cache?timeout=20", timeout=TIMEOUT_S)
        return flushed.status_code == 200

    def _post(self, body: dict | bytes, **keywords: Any) -> requests.Response:
        data = body if isinstance(body, bytes) else json.dumps(body)
        return requests.post(
            f"{self.url}/generate",
            data=data,
            headers={"Content-Type": "application/json"},
            timeout=TIMEOUT_S,
            **keywords,
        )

    def _answers(self, response: requests.Response, body: dict) -> list[dict]:
        if response.status_code != 200:
            raise Wrong(f"{_short(body)} got {response.status_code}: {response.text[:200]}")
        if body.get("stream"):
            lines = [line for line in response.iter_lines() if line.startswith(b"data: {")]
            return [json.loads(lines[-1].removeprefix(b"data: "))]
        answer = response.json()
        return answer if isinstance(answer, list) else [answer]

    def _check(self, answer: dict, body: dict) -> None:
        meta, limit = answer["meta_info"], body["sampling_params"]["max_new_tokens"]
        count, reason = meta["completion_tokens"], meta["finish_reason"]
        if count > limit or (reason or {}).get("type") not in ("stop", "length"):
            raise Wrong(f"{_short(body)} gave {count} tokens and ended with {reason}")
        if body.get("return_logprob") and len(meta["output_token_logprobs"]) != count:
            raise Wrong(
                f"{_short(body)} gave {len(meta['output_token_logprobs'])} log-probabilities for {count} tokens"
            )

    def _plain(self, body: dict) -> list[int]:
        key = json.dumps(body, sort_keys=True)
        with self._lock:
            known = self._known.get(key)
        if known is None:
            answer = requests.post(f"{self.plain_url}/generate", json=body, timeout=TIMEOUT_S)
            known = answer.json()["output_ids"]
            with self._lock:
                self._known[key] = known
        return known

    def _refused(self, traffic: Traffic) -> str:
        response = self._post(traffic.body)
        said = _sentence(response)
        if not 400 <= response.status_code < 500 or len(said) < 10:
            raise Wrong(
                f"malformed {_short(traffic.body)} got {response.status_code}: {response.text[:200]}"
            )
        return "refused"

    def _leave(self, body: dict) -> str:
        with self._post(body, stream=True) as response:
            if response.status_code != 200:
                raise Wrong(f"{_short(body)} got {response.status_code}: {response.text[:200]}")
            for _ in zip(response.iter_lines(), range(3), strict=False):
                pass
        return "left"

    def _abort(self, body: dict) -> str:
        abort = threading.Timer(
            0.2,
            lambda: requests.post(
                f"{self.url}/abort_request", json={"rid": body["rid"]}, timeout=TIMEOUT_S
            ),
        )
        abort.start()
        try:
            response = self._post(body | {"stream": False})
        finally:
            abort.join()
        if response.status_code not in (200, 400, 499, 503):
            raise Wrong(f"aborted {_short(body)} got {response.status_code}: {response.text[:200]}")
        return "aborted"


def _sentence(response: requests.Response) -> str:
    try:
        answer = response.json()
    except ValueError:
        return ""
    error = answer.get("error", answer)
    return str(error.get("message", "")) if isinstance(error, dict) else str(error)


def _short(body: dict | bytes) -> str:
    text = str(body)
    return text if len(text) < 400 else f"{text[:200]} … {text[-200:]}"
