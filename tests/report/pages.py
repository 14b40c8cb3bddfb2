"""Reading a report back with the standard library's parser, as a browser's would."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

OUTSIDE = ("src", "href", "action", "data", "poster", "srcset")


class Page(HTMLParser):
    """Tags in order, scripts by id, and every reference that leads out of the page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: dict[str, str] = {}
        self.references: list[str] = []
        self._script: str | None = None
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [v for k, v in attrs if k in OUTSIDE and v and not v.startswith("#")]
        if tag == "script":
            self._script = dict(attrs).get("id") or "program"
            self.scripts[self._script] = ""

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None

    @property
    def data(self) -> Any:
        return json.loads(self.scripts["data"])
