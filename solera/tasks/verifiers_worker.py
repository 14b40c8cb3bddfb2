"""Runs an environment of the package `verifiers` in a process of its own: `python FILE list|play SETTINGS`.

It needs verifiers and nothing of Solera, so it can use another Python installation. `list` prints the tasks. `play`
speaks JSON, one object per line, through its standard input and output: it is told which episodes to play, passes on
what they ask the model, and reports their rewards. The environment sees a server with the OpenAI protocol.
"""

import asyncio
import json
import os
import sys
import tomllib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

Send = Callable[[dict[str, Any]], None]
DONE = b"data: [DONE]\n\n"


def load(settings: dict[str, Any]) -> Any:
    """The environment. Unless the settings say otherwise, agents run on this machine, in a plain chat loop."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment, resolve_env_config

    name = settings["name"]
    config = tomllib.loads(Path(settings["path"]).read_text()) if settings["path"] else {}
    config = config.get("env", config)
    config["taskset"] = {"id": name, **config.get("taskset", {})}
    own = {} if default_harness_id(name) != "bash" else {"harness": {"id": "null"}}
    for role, field in env_config_type(name, config.get("id", "")).model_fields.items():
        if isinstance(field.default, AgentConfig):
            config[role] = {"runtime": {"type": "subprocess"}, **own, **config.get(role, {})}
    return load_environment(resolve_env_config(config))


def describe(environment: Any, most: int) -> list[dict[str, Any]]:
    """The messages that each task begins with, as far as they are known."""
    return [{"key": task.key, "messages": _messages(task.data)} for task in tasks_of(environment, most)]


def tasks_of(environment: Any, most: int) -> list[Any]:
    """All tasks of a finite set, the first ones of an endless set. A set that does not say which it is, and that has no
    length, counts as endless."""
    tasks = environment.taskset
    endless = getattr(tasks, "INFINITE", not hasattr(tasks, "__len__"))
    return list(islice(tasks, most if endless else None))


def _messages(data: Any) -> list[dict[str, Any]]:
    from verifiers.v1.dialects.chat import message_to_wire

    begun = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*begun, {"role": "user", "content": data.prompt}]
    return begun + [message_to_wire(message) for message in data.prompt or ()]


class Stage:
    """Plays episodes, and forwards their requests."""

    def __init__(self, environment: Any, most: int, send: Send) -> None:
        self.environment = environment
        self.tasks = tasks_of(environment, most)
        self.send = send
        self.port = 0
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0

    async def serve(self, request: Any) -> Any:
        """Answer a request for a completion, as a stream if the client wants one."""
        from aiohttp import web

        body = await request.json()
        number, self._number = self._number, self._number + 1
        self._asked[number] = asyncio.get_running_loop().create_future()
        self.send({"ask": number, "episode": int(request.match_info["episode"]), "body": body})
        try:
            given = await self._asked[number]
        finally:
            del self._asked[number]
        if "error" in given:
            return web.json_response({"error": {"message": given["error"]}}, status=400)
        if not body.get("stream"):
            return web.json_response(_completion(given, number, "chat.completion", "message", given["message"]))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        calls = [{"index": n, **call} for n, call in enumerate(given["message"].get("tool_calls", ()))]
        delta = {**given["message"], **({"tool_calls": calls} if calls else {})}
        chunk = _completion(given, number, "chat.completion.chunk", "delta", delta)
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode() + DONE)
        return response

    def answer(self, number: int, given: dict[str, Any]) -> None:
        if number in self._asked and not self._asked[number].done():
            self._asked[number].set_result(given)

    async def play(self, episode: int, task: int) -> None:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        address = f"http://127.0.0.1:{self.port}/{episode}/v1"
        client = EvalClientConfig(base_url=address, api_key_var="SOLERA_NO_KEY")
        try:
            played = await self.environment.run_episode(self.tasks[task], ModelContext("solera", client))
            errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
            if len(played.traces) > 1:
                raise ValueError(f"{len(played.traces)} agents took part; Solera trains one")
            if errors or not played.ok:
                raise ValueError(errors[0].message if errors else "the episode is not ok")
            trace = played.traces[0]
            rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
            self.send({"end": episode, "rewards": rewards, "why": trace.stop_condition})
        except Exception as error:  # it costs one episode
            self.send({"end": episode, "error": f"{type(error).__name__}: {error}"})


def _completion(given: dict[str, Any], number: int, kind: str, field: str, message: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, field: message, "finish_reason": given["finish_reason"]}
    return {
        "id": f"solera-{number}", "object": kind, "created": 0, "model": "solera", "choices": [choice],
        "usage": given["usage"],
    }  # fmt: skip


async def play(environment: Any, most: int, send: Send) -> None:
    from aiohttp import web

    stage = Stage(environment, most, send)
    app = web.Application(client_max_size=2**28)
    app.router.add_post("/{episode}/v1/chat/completions", stage.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stage.port = runner.addresses[0][1]
    async with environment.serving():
        send({"ready": len(stage.tasks)})
        await _obey(stage)
    await runner.cleanup()


async def _obey(stage: Stage) -> None:
    """Follow orders until the standard input ends."""
    reader, playing = asyncio.StreamReader(limit=2**28), dict[int, asyncio.Task[None]]()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        order = json.loads(line)
        if "play" in order:
            playing[order["play"]] = loop.create_task(stage.play(order["play"], order["task"]))
        elif "leave" in order:
            playing.pop(order["leave"]).cancel()
        else:
            stage.answer(order["ask"], order)


def main() -> None:
    what, settings = sys.argv[1], json.loads(sys.argv[2])
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # verifiers needs uv
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an environment prints must not get between the messages

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")

    try:
        environment = load(settings)
        if what == "list":
            send({"tasks": describe(environment, settings["most"])})
            return
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        return
    asyncio.run(play(environment, settings["most"], send))


if __name__ == "__main__":
    main()
