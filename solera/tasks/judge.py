"""The other side of `judges.py`: a process that answers one question a line. `python -m solera.tasks.judge MODULE`

Whatever a text makes a package do (compute for ever, take all memory, write files, print, kill its parent), it does in
a child of this process: one that dies is replaced by another in no time, with the packages loaded.
"""

import importlib
import json
import math
import mmap
import os
import resource
import sys
from typing import Any, TextIO

from solera.errors import one_line

MEMORY = 4 * 2**30


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a package prints must not be taken for a reply
    try:
        module = importlib.import_module(sys.argv[1])
        module.prepare()
    except ImportError as error:
        print(json.dumps({"missing": error.name, "why": one_line(error)}), file=replies, flush=True)
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps({"value": None}), file=replies, flush=True)
    asked = mmap.mmap(-1, 1)  # shared with the child: whether it owes a reply
    while not _served(module, replies, asked):
        if asked[0]:
            print(json.dumps({"error": "it computed for too long, or its process died"}), file=replies, flush=True)
            asked[0] = 0


def _served(module: Any, replies: TextIO, asked: mmap.mmap) -> bool:
    """Whether a child has answered everything there was to ask."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    for line in sys.stdin:
        asked[0] = 1
        token, function, arguments, seconds = json.loads(line)
        spent = math.ceil(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        resource.setrlimit(resource.RLIMIT_CPU, (spent + seconds, resource.RLIM_INFINITY))  # beyond it, SIGXCPU
        reply = json.dumps({"token": token} | _reply(module, function, arguments))
        asked[0] = 0
        print(reply, file=replies, flush=True)
    os._exit(0)


def _reply(module: Any, function: str, arguments: list[Any]) -> dict[str, Any]:
    try:
        return {"value": getattr(module, function)(*arguments)}
    except BaseException as error:  # packages time themselves out with errors that are no Exception
        return {"error": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    main()
