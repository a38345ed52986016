"""`python -m sglang_dflash.soak URL`: a bounded random mix of requests, and a report.

Concurrency swings between two limits in waves. After each wave the server is idle: its slots must all be
free once the cache is flushed. Exit status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import requests
from transformers import AutoTokenizer

from sglang_dflash.errors import DFlashError, end_with_the_sentence
from sglang_dflash.soak.client import Client, Wrong
from sglang_dflash.soak.traffic import Mix, Traffic


@dataclass
class Report:
    """What happened.

    Attributes:
        memory: (seconds, MB, MB without pages of files) of the server's processes together after each wave.
        processes: MB of each by name and id, after the first wave and after the last.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, float, float]] = field(default_factory=list)
    processes: dict[str, list[float]] = field(default_factory=dict)
    waves: int = 0
    seconds: float = 0

    def note_memory(self, pid: int) -> None:
        """Resident memory of a process and its children, as it is now."""
        process = psutil.Process(pid)
        resident = private = 0.0
        for one in (process, *process.children(recursive=True)):
            memory = one.memory_info()
            mb = round(memory.rss / 1e6, 1)
            resident += mb
            private += (memory.rss - memory.shared) / 1e6
            name = f"{one.name()} {one.pid}"
            self.processes[name] = [self.processes.get(name, [mb])[0], mb]
        self.memory.append((self.seconds, resident, private))

    def slopes(self) -> list[float] | None:
        """Growth in the second half, MB a minute: resident, private. None if it was not watched."""
        late = [sample for sample in self.memory if sample[0] > self.seconds / 2]
        if len(late) < 3:
            return None
        times, *sizes = np.array(late).T
        return [round(float(np.polyfit(times / 60, mb, 1)[0]), 3) for mb in sizes]

    def by_minute(self) -> list[tuple[float, float]]:
        """MB resident and private after the first wave, and after the last that ended in each minute."""
        last = {int(seconds // 60): sizes for seconds, *sizes in self.memory}
        first = [sizes for _, *sizes in self.memory[:1]]
        return [(round(mb, 1), round(own, 1)) for mb, own in (*first, *last.values())]

    def as_json(self) -> dict:
        resident, private = self.slopes() or (None, None)
        minutes = self.by_minute()
        return {
            "requests": sum(self.outcomes.values()),
            "outcomes": dict(self.outcomes),
            "wrong": self.wrong,
            "waves": self.waves,
            "seconds": round(self.seconds, 1),
            "resident_mb_by_process": self.processes,
            "resident_mb_by_minute": [mb for mb, _ in minutes],
            "resident_slope_mb_per_minute": resident,
            "private_mb_by_minute": [mb for _, mb in minutes],
            "private_slope_mb_per_minute": private,
        }


def soak(client: Client, mix: Mix, options: argparse.Namespace) -> Report:
    """Waves until the time or the number of requests is reached, or the server is gone."""
    report, begin = Report(), time.monotonic()
    while report.seconds < options.seconds and sum(report.outcomes.values()) < options.requests:
        concurrency = mix.random.randint(options.min_concurrency, options.max_concurrency)
        wave = [mix.request(options.malformed) for _ in range(4 * concurrency)]
        with ThreadPoolExecutor(concurrency) as pool:
            for outcome in pool.map(lambda traffic: send(client, traffic), wave):
                kind, _, message = outcome.partition(": ")
                report.outcomes[kind] += 1
                if message:
                    report.wrong.append(message)
        report.waves += 1
        report.wrong += idle_troubles(client)
        report.seconds = time.monotonic() - begin
        if options.pid:
            report.note_memory(options.pid)
        if len(report.wrong) > 20:
            break
    return report


def send(client: Client, traffic: Traffic) -> str:
    """The outcome in a word, and after a colon what was wrong."""
    try:
        return client.send(traffic)
    except Wrong as wrong:
        return f"wrong: {wrong}"
    except requests.RequestException as error:
        return f"lost: {traffic.body!s:.300} got no answer: {error}"


def idle_troubles(client: Client) -> list[str]:
    """What keeps a server that nobody asks from being empty."""
    deadline = time.monotonic() + 30
    try:
        while (load := client.load())["num_reqs"] and time.monotonic() < deadline:
            time.sleep(0.1)
        if load["num_reqs"]:
            return [f"{load['num_reqs']} requests never ended"]
        if not client.flush():
            return ["/flush_cache was refused by an idle server"]
        if tokens := client.load()["num_tokens"]:
            return [f"{tokens} KV slots leaked"]
    except requests.RequestException as error:
        return [f"the server is gone: {error}"]
    return []


def mix_for(url: str, prompts: Path, seed: int) -> Mix:
    """Requests with the prompts of a file, for the model that a server serves.

    Raises:
        DFlashError: there is no server, or no prompts.
    """
    questions = read_questions(prompts)
    try:
        info = requests.get(f"{url}/get_model_info", timeout=30).json()
        card = requests.get(f"{url}/v1/models", timeout=30).json()["data"][0]
    except requests.RequestException as error:
        raise DFlashError(
            f"{url} does not answer as an SGLang server ({error}): give the URL of one that runs."
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(info["model_path"])
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in questions
    ]
    return Mix(seed, ids, card["max_model_len"], len(tokenizer))


def read_questions(path: Path) -> list[str]:
    """The first 200 of a file.

    Raises:
        DFlashError: it cannot be read, or has something else.
    """
    try:
        rows = [json.loads(line) for line in path.open()][:200]
        questions = [row["question"] for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        questions, reason = [], error
    else:
        reason = "it is empty"
    if not questions:
        raise DFlashError(
            f"--prompts {path} has no questions ({reason}): give JSON lines with a question each, as "
            "checkpoints/tiny/data/test.jsonl has them."
        )
    return questions


def output_file(text: str) -> Path:
    """Its folder is made before the soak rather than missed after it."""
    path = Path(text)
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"the folder {path.parent} cannot be made ({error.strerror}): name another one"
        ) from None
    return path


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sglang_dflash.soak", description=__doc__)
    parser.add_argument("url", help="of the server, on this machine")
    parser.add_argument("--plain", help="URL of the same model without speculation, for parity")
    parser.add_argument("--prompts", type=Path, default=Path("checkpoints/tiny/data/test.jsonl"))
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--requests", type=int, default=10**9, help="end after so many")
    parser.add_argument("--min-concurrency", type=int, default=1)
    parser.add_argument("--max-concurrency", type=int, default=32)
    parser.add_argument("--malformed", type=float, default=0.05, help="share of the requests")
    parser.add_argument("--pid", type=int, help="of the server, to watch its memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=output_file, help="write the report as JSON")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    end_with_the_sentence()
    options = parse(arguments)
    mix = mix_for(options.url, options.prompts, options.seed)
    report = soak(Client(options.url, options.plain), mix, options)
    text = json.dumps(report.as_json(), indent=2)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
