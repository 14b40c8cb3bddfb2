"""vLLM's own count of the tokens that it has sampled."""

from solera.engines.vllm.http import Http, ServerError
from solera.errors import SoleraError

NAME = "vllm:generation_tokens_total"


class TokenCounter:
    """Counts the tokens that a server has sampled since this object was made. A server that was restarted begins at 0
    again; the sum goes on. While a server does not answer, the last reading holds."""

    def __init__(self, http: Http) -> None:
        self.http = http
        self._last = self._ask()
        self._total = 0

    def _ask(self) -> int:
        return total_of(self.http.text("/metrics"), self.http.url)

    def read(self) -> int:
        try:
            now = self._ask()
        except ServerError:
            return self._total
        self._total += now - self._last if now >= self._last else now
        self._last = now
        return self._total

    def exclude(self, tokens: int) -> None:
        """Take out tokens with which the engine has checked its server."""
        self._total -= tokens


def total_of(metrics: str, url: str) -> int:
    """The counter in a page of metrics, summed over the server's engines.

    >>> total_of("# HELP\\n" + "".join(f'{NAME}{{engine="{n}"}} {count}\\n' for n, count in enumerate([12.0, 3.0])), "")
    15
    """
    values = [line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith((f"{NAME}{{", f"{NAME} "))]
    if not values:
        raise SoleraError(f"vLLM server {url} does not count its tokens ({NAME}): start it without --disable-log-stats")
    return round(sum(map(float, values)))
