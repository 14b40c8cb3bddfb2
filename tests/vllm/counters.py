"""vLLM's own count of sampled tokens, read from outside the run."""

import json
import time
import urllib.request

from tests.vllm.proxy import GENERATE, Proxy

CHECK = 62
"""Tokens of the text with which the prefix cache is checked. No prompt of the task is as long."""

SAMPLED = "vllm:generation_tokens_total"


def counters_of(urls: list[str]) -> list[int]:
    """The servers' counts, once no request is left and they do not change any more."""
    before: list[int] = []
    while True:
        pages = [_metrics(url) for url in urls]
        now = [_sum(page, SAMPLED) for page in pages]
        busy = sum(_sum(page, f"vllm:num_requests_{state}") for page in pages for state in ("running", "waiting"))
        if now == before and not busy:
            return now
        before = now
        time.sleep(1.5)


def sampled_by(url: str) -> int:
    """The server's count as it is now."""
    return _sum(_metrics(url), SAMPLED)


def settled(url: str) -> int:
    """The count of a server that samples nothing now. It counts a moment after it has answered."""
    before, now = -1, sampled_by(url)
    while now != before:
        time.sleep(0.5)
        before, now = now, sampled_by(url)
    return now


def _metrics(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as page:
        return page.read().decode().splitlines()


def _sum(page: list[str], name: str) -> int:
    return round(sum(float(line.split()[-1]) for line in page if line.startswith(f"{name}{{")))


class Checks:
    """Counts the tokens with which Solera checked the prefix cache. They are not the run's."""

    def __init__(self, proxies: list[Proxy]) -> None:
        self.tokens = 0
        for proxy in proxies:
            proxy.spoil = self.watch

    def watch(self, path: str, request: bytes, answer: bytes | None) -> bytes | None:
        if path == GENERATE and answer is not None and len(json.loads(request)["token_ids"]) == CHECK:
            self.tokens += len(json.loads(answer)["choices"][0]["token_ids"])
        return answer
