"""vLLM's own count of the tokens that it has sampled."""

import threading

from solera.engines.vllm.http import Http, ServerError
from solera.engines.vllm.readings import Kept, Reading, Readings
from solera.errors import SoleraError

TOKENS = "vllm:generation_tokens_total"
STARTED = "process_start_time_seconds"


class TokenCounter:
    """Counts the tokens that one server has sampled for a run. An engine that is opened again for the same server goes
    on with the same counter. A server that was restarted begins at 0 again; the sum goes on. While a server does not
    answer, the last reading holds.

    `readings` are for a run that is resumed after it was killed: what the server has sampled since the last reading is
    then counted, too. `holds` is the lineage of the weights that the server holds. If these are not the run's own,
    somebody else has used the server meanwhile, and its tokens up to now are not the run's.
    """

    def __init__(self, http: Http, readings: Readings | None = None, holds: str = "") -> None:
        kept = readings.of(http.url) if readings is not None else None
        self.total = kept.total if kept is not None else 0
        """Tokens at the last reading, less those that were excluded since."""
        self._http = http
        self._readings = readings
        self._lineage = ""
        self._excluded = 0
        self._lock = threading.Lock()
        self._last = now = self._ask()
        if kept is not None and (kept.lineage, kept.reading.started) == (holds, now.started):
            self._lineage = kept.lineage
            self._last = Reading(min(kept.reading.tokens + kept.excluded, now.tokens), now.started)

    def _ask(self) -> Reading:
        page, url = self._http.text("/metrics"), self._http.url
        return Reading(total_of(page, url), float(next(iter(_values(page, STARTED)), 0)))

    def connect(self, http: Http) -> None:
        """Use this connection from now on."""
        self._http = http

    def read(self) -> int:
        with self._lock:
            try:
                now = self._ask()
            except ServerError:
                return self.total
            again = now.started != self._last.started or now.tokens < self._last.tokens
            self.total += now.tokens if again else now.tokens - self._last.tokens
            self._last, self._excluded = now, 0
            self._keep()
            return self.total

    def exclude(self, tokens: int) -> None:
        """Leave out tokens with which the engine has checked its server."""
        with self._lock:
            self.total -= tokens
            self._excluded += tokens
            self._keep()

    def belongs_to(self, lineage: str) -> None:
        """The server holds weights of this lineage now."""
        with self._lock:
            self._lineage = lineage
            self._keep()

    def _keep(self) -> None:
        if self._readings is not None:
            kept = Kept(self._last, self._excluded, self._lineage, self.total + self._excluded)
            self._readings.keep(self._http.url, kept)


def total_of(metrics: str, url: str) -> int:
    """The counter in a page of metrics, summed over the server's engines.

    >>> page = "".join(f'{TOKENS}{{engine="{n}"}} {count}\\n' for n, count in enumerate([12.0, 3.0]))
    >>> total_of("# HELP\\n" + page, "")
    15
    """
    values = _values(metrics, TOKENS)
    if not values:
        raise SoleraError(
            f"vLLM server {url} does not count its tokens ({TOKENS}): start it without --disable-log-stats"
        )
    return round(sum(map(float, values)))


def _values(metrics: str, name: str) -> list[str]:
    return [line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
