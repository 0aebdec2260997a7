"""A scripted model that does a coding agent's task: `python -m tests.support.agent_script > agents.json`, then
`python -m serve_app model=scripted:agents.json`.

For each agent: read a file with a bug, mend it, run its tests, say so; one call a turn, with that agent's own tools
and the markup of the Qwen recipe. The file and the function bear the agent's name, so that the end of the conversation
tells whose turn it is. Conformance suites ask for the weather and get a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tests.support.scripted import CHATML

MODEL: Final = "flare-test/agents"
CONTEXT: Final = 200_000
ANSWER: Final = "The addition is mended and its test passes."


def source(agent: str, sign: str = "-") -> str:
    return f"def add_{agent}(a, b):\n    return a {sign} b  # {agent}\n"


def checking_source(agent: str) -> str:
    return (
        f"import unittest\n\nfrom calc_{agent} import add_{agent}\n\n\nclass Test(unittest.TestCase):\n"
        f"    def test_add(self):\n        self.assertEqual(add_{agent}(2, 3), 5)\n"
    )


def prompt(agent: str) -> str:
    """What a user asks; a real model can do it too."""
    return (
        f"Task {agent}: read calc_{agent}.py in this folder, mend its bug so that it adds, run"
        f" `{check_command(agent)}`, and say briefly what you did."
    )


def check_command(agent: str) -> str:
    return f"python3 -m unittest -q test_{agent}"


def _patch(agent: str) -> str:
    old, new = (f"return a {sign} b  # {agent}" for sign in "-+")
    return f"*** Begin Patch\n*** Update File: calc_{agent}.py\n@@\n-    {old}\n+    {new}\n*** End Patch\n"


def _steps(agent: str) -> list[tuple[str, Mapping[str, str]]]:
    """The agent's calls, in order: tool and arguments."""
    file, command = f"calc_{agent}.py", check_command(agent)
    old, new = (f"a {sign} b  # {agent}" for sign in "-+")
    match agent:
        case "codex":
            return [
                ("exec_command", {"cmd": f"cat {file}"}),
                ("apply_patch", {"input": _patch(agent)}),
                ("exec_command", {"cmd": command}),
            ]
        case "opencode":
            return [
                ("read", {"filePath": file}),
                ("edit", {"filePath": file, "oldString": old, "newString": new}),
                ("bash", {"command": command, "description": "Run the tests"}),
            ]
        case _:
            return [
                ("Read", {"file_path": file}),
                ("Edit", {"file_path": file, "old_string": old, "new_string": new}),
                ("Bash", {"command": command, "description": "Run the tests"}),
            ]


def _call(name: str, arguments: Mapping[str, str]) -> list[Any]:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return [
        f"I use {name} now.\n",
        {"token": "</think>"},
        "\n\n",
        {"token": "<tool_call>"},
        f"\n<function={name}>\n{body}</function>\n",
        {"token": "</tool_call>"},
    ]


def script() -> dict[str, Any]:
    """The scripted model's file. Which text ends last in the prompt decides who is answered with what."""
    turns: list[dict[str, Any]] = []
    for agent in ("claude", "codex", "opencode"):
        # the task; the file's content; the mended line; the command, wherever they were seen last
        cues = (f"Task {agent}:", f"a - b  # {agent}", f"a + b  # {agent}")
        for cue, (name, arguments) in zip(cues, _steps(agent), strict=True):
            turns.append({"when": cue, "output": _call(name, arguments)})
        done = ["Nothing is left to do.\n", {"token": "</think>"}, f"\n\n{ANSWER}"]
        turns.append({"when": f"unittest -q test_{agent}\n</parameter>", "output": done})
    turns.append({"when": "weather in San Francisco?", "output": _call("get_weather", {"location": "San Francisco"})})
    turns.append({"output": ["I think.\n", {"token": "</think>"}, "\n\nHello from the script."]})
    return {
        "model_id": MODEL,
        "recipe": "qwen38",
        "context": CONTEXT,
        "tokenizer": dict(CHATML),
        "turns": turns,
    }


if __name__ == "__main__":
    print(json.dumps(script(), indent=1))
