"""Tools of real MCP servers: their schemas and results, servers that die or hang, and a whole run."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from solera.errors import SoleraError
from solera.tasks.event_loop import EventLoop
from solera.tasks.mcp_tools import mcp_tools
from solera.tasks.tool_calls import Call
from solera.tasks.tools import Toolbox
from tests.command import solera as command

pytestmark = pytest.mark.adapters
SERVER = Path(__file__).with_name("mcp_server.py")


class Server:
    """The command of the server, and the processes that were started with it."""

    def __init__(self, folder: Path) -> None:
        self.pids = folder / "pids"
        self.command = [sys.executable, str(SERVER), str(self.pids)]

    @property
    def started(self) -> int:
        return len(self.pids.read_text().split())

    def left(self) -> list[str]:
        return [pid for pid in self.pids.read_text().split() if Path(f"/proc/{pid}").exists()]


def ask(events: EventLoop, tools: Toolbox, *calls: tuple[str, dict]) -> list[str]:
    results = events.run(tools.answer([Call(name, arguments) for name, arguments in calls], 60))
    return [result.text for result in results]


def test_calls_share_one_server_and_one_that_dies_or_hangs_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr("solera.tasks.mcp_tools.ALIVE", 2.0)
    server = Server(tmp_path)
    tools = mcp_tools(server.command)
    about = {tool.name: tool.schema["function"] for tool in tools}
    assert list(about) == ["add", "open", "refuse", "wait", "hang"]
    assert about["add"]["description"] == "Add two numbers."
    assert about["add"]["parameters"]["properties"]["a"]["type"] == "integer"
    assert server.started == 1 and not server.left()
    patient, hasty = Toolbox(tools, timeout=20), Toolbox(tools, timeout=4)
    one = ("add", {"a": 1, "b": 2})
    with EventLoop() as events:
        assert ask(events, patient, one, one) == ["3", "3"]
        wrong, failed, fine = ask(events, patient, ("add", {"a": "x"}), ("refuse", {}), one)
        assert "valid integer" in wrong and failed == "error: McpError: Error executing tool refuse" and fine == "3"
        assert ask(events, hasty, ("wait", {}), one) == ["error: wait took longer than 4 s", "3"]
        time.sleep(2.5)
        assert ask(events, patient, one) == ["3"] and server.started == 2  # a slow call is no reason to start it again
        dead = ask(events, patient, ("open", {"box": 7}), ("wait", {}))
        assert all(text.startswith("error: McpError:") and "Connection closed" in text for text in dead)
        assert not any(SERVER.name in text for text in dead)  # nor a key in the command
        time.sleep(0.2)
        assert ask(events, patient, one) == ["3"] and server.started == 3
        assert ask(events, hasty, ("hang", {})) == ["error: hang took longer than 4 s"]
        time.sleep(2.5)
        assert ask(events, patient, one) == ["3"] and server.started == 4
        ask(events, hasty, ("hang", {}))
    assert not server.left()


def test_a_server_with_an_address(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server(tmp_path)
    running = subprocess.Popen([*server.command, str(port)], stderr=subprocess.DEVNULL)
    try:
        tools = _listening(f"http://127.0.0.1:{port}/mcp")
        with EventLoop() as events:
            assert ask(events, Toolbox(tools), ("add", {"a": 2, "b": 2})) == ["4"]
            running.kill()
            running.wait()
            (said,) = ask(events, Toolbox(tools), ("add", {"a": 2, "b": 2}))
            assert said.startswith("error: McpError:") and "127.0.0.1" not in said
    finally:
        running.kill()
        running.wait()


def _listening(address: str) -> list:
    until = time.monotonic() + 60
    while True:
        try:
            return mcp_tools(address, only=["add"])
        except SoleraError as error:
            if time.monotonic() > until or not str(error).startswith("mcp_tools: http://127.0.0.1:"):
                raise
            time.sleep(0.2)


@pytest.mark.parametrize(
    ("server", "complaint"),
    [("", "the command is empty"), ("no-such-command-here", "no-such-command-here: the server failed: .*No such file"),
     ([sys.executable, "-c", "import sys; sys.exit('bad key')"], "the server failed: bad key"),
     ([sys.executable, "-c", "print('hello')"], "the server failed: ")],
)  # fmt: skip
def test_a_command_that_is_no_server_is_refused_in_one_line(server, complaint):
    with pytest.raises(SoleraError, match=f"^mcp_tools: .*{complaint}") as raised:
        mcp_tools(server)
    assert "\n" not in str(raised.value)


TASK = """
    import solera
    from solera.tasks.boxes import Boxes

    class Served(Boxes):
        "The boxes of a server: box 7 ends it, the others hold wrong codes."
        def __init__(self, codec):
            tools = solera.mcp_tools(COMMAND, only=["open"])
            self.agent = solera.Agent(codec, tools, solera.Limits(turns=3), call_format="hermes")

        async def run(self, prompt, generate):
            chat = await self.agent.talk(prompt, generate)
            return chat.rollout(prompt, solera.Reward(float(chat.calls > 0)))
"""


def test_a_run_with_a_server_that_dies_now_and_then(tmp_path):
    server = Server(tmp_path)
    (tmp_path / "served.py").write_text(textwrap.dedent(TASK).replace("COMMAND", repr(server.command)))
    found = command(
        "train", "--task", "served.py:Served", "--model", "embedded_agent", "--run.steps", "3", "--run.root", "runs",
        "--run.name", "r", "--collect.prompts", "4", "--collect.group_size", "8", "--sampling.max_tokens", "16",
        "--evaluate.problems", "4", "--report.page", "false", cwd=tmp_path,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()]
    calls, errors = (sum(line.get(f"tools/{name}", 0) for line in lines) for name in ("calls", "errors"))
    assert calls > errors > 0
    assert not server.left()


def test_without_the_package_one_line_names_the_extra(tmp_path):
    (tmp_path / "mcp.py").write_text("raise ImportError('No module named mcp')")
    found = subprocess.run(
        [sys.executable, "-c", "import solera; solera.mcp_tools('server')"], capture_output=True, text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert "install the extra mcp" in found.stderr.splitlines()[-1]
