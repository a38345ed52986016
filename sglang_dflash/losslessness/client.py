"""A server as a black box: SGLang's native API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import requests

from sglang_dflash.losslessness.errors import CannotCompare
from sglang_dflash.losslessness.progress import Progress, results

SECONDS = 600  # for one request; a batch of long answers on a CPU takes minutes


class Client:
    """Asks one server.

    Attributes:
        name: what messages call it.
    """

    def __init__(self, name: str, url: str):
        self.name, self.url = name, url.rstrip("/")

    def model_info(self) -> dict:
        return self._json(self._send("GET", "/model_info"))

    def generate(self, ids: list[int], sampling: dict, **fields: Any) -> Any:
        """The answer to a prompt of token ids; with an `n` above 1, a list of answers.

        Raises:
            CannotCompare: the server is not there or refuses the request.
        """
        body = {"input_ids": ids, "sampling_params": sampling} | fields
        return self._json(self._send("POST", "/generate", json=body))

    def _send(self, method: str, path: str, **keywords: Any) -> requests.Response:
        try:
            return requests.request(method, self.url + path, timeout=SECONDS, **keywords)
        except requests.RequestException as error:
            raise CannotCompare(
                f"the {self.name} server at {self.url} does not answer {path} "
                f"({type(error).__name__}): start it, or give its URL."
            ) from error

    def _json(self, response: requests.Response) -> Any:
        if response.status_code == 200:
            return response.json()
        try:
            text = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = response.text.strip()[:300]
        raise CannotCompare(
            f"the {self.name} server at {self.url} answers with status {response.status_code}: "
            f"{text or 'no reason given'}"
        )


def verify_steps(answers: Iterable[dict]) -> tuple[int, int]:
    """(verify steps, tokens that they committed); (0, 0) of a server that does not speculate.

    The first token of an answer comes from its prefill, not from a verify step.
    """
    metas = [answer["meta_info"] for answer in answers]
    metas = [meta for meta in metas if meta.get("spec_verify_ct")]
    return (
        sum(meta["spec_verify_ct"] for meta in metas),
        sum(meta["completion_tokens"] - 1 for meta in metas),
    )


def ask_all(
    what: str,
    asked: Sequence[tuple[Callable[[Any], Any], Sequence[Any]]],
    concurrency: int,
    progress: Progress,
    unit: float,
) -> list[list[Any]]:
    """Asks each server all of its items, all servers at once; the first error ends it.

    Args:
        asked: for each server, how an item is asked, and its items.
        concurrency: items at once, of each server.
        unit: tokens that an item may draw.

    Returns:
        The answers of each server, in the order of its items.
    """
    pools = [ThreadPoolExecutor(concurrency) for _ in asked]
    try:
        futures = [
            [pool.submit(ask, item) for item in items]
            for pool, (ask, items) in zip(pools, asked, strict=True)
        ]
        answers = iter(results(sum(futures, []), progress, what, unit))
        return [list(islice(answers, len(items))) for _, items in asked]
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)  # who is under way may take minutes
