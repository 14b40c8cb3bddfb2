"""An MCP server for tests: `python mcp_server.py PIDS [PORT]`. It adds its process number to a file."""

import asyncio
import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("test", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def open(box: int) -> str:
    """Show what is in a box."""
    if box == 7:
        os._exit(3)
    return f"code {box + 40}"


@server.tool()
def refuse() -> str:
    """Fail."""
    raise ValueError("no luck")


@server.tool()
async def wait() -> str:
    """Take long. Other calls are answered meanwhile."""
    await asyncio.sleep(600)
    return ""


@server.tool()
async def hang() -> str:
    """Block the whole server."""
    time.sleep(600)
    return ""


with __builtins__.open(sys.argv[1], "a") as pids:
    pids.write(f"{os.getpid()}\n")
if len(sys.argv) > 2:
    server.run("streamable-http", port=int(sys.argv[2]))
else:
    server.run("stdio")
