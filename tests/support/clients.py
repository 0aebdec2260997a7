"""Real coding agents as the tests drive them: where their binaries are, how they are pointed at a server, and a task.

Each agent is configured with nothing but what `serve_app.client_config` writes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serve_app.client_config import CLIENTS, fetch
from tests.support.agent_script import checking_source, prompt, source

ROOT: Final = Path(__file__).resolve().parents[2]
QUALIFIED: Final[Mapping[str, str]] = {"claude": "2.1.296", "codex": "0.162.1", "opencode": "1.18.33"}
SECONDS: Final = 240


@dataclass(frozen=True, slots=True)
class Agent:
    """`name` of the client, and of its files in the task; `options` select its mode."""

    name: str
    mode: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}-{self.mode}"


AGENTS: Final = (
    Agent("claude", "normal"),
    Agent("claude", "bare", ("--bare",)),
    Agent("codex", "normal"),
    Agent("opencode", "normal"),
)


def binary(name: str) -> Path | None:
    """The client on PATH, else where tests/server/install_clients.sh puts it."""
    found = shutil.which(name)
    if found is not None:
        return Path(found)
    installed = ROOT / ".clients" / "bin" / name
    return installed if installed.exists() else None


def workspace(folder: Path, agent: Agent) -> Path:
    """A git repository with a bug and a test that shows it."""
    folder.mkdir()
    (folder / f"calc_{agent.name}.py").write_text(source(agent.name))
    (folder / f"test_{agent.name}.py").write_text(checking_source(agent.name))
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-q", "-m", "start")):
        subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True)
    return folder


def run(
    agent: Agent, executable: Path, url: str, key: str, folder: Path, home: Path
) -> subprocess.CompletedProcess[str]:
    """Gives the task to the agent, in `folder`, with an environment of its own; waits for its end."""
    files = CLIENTS[agent.name](fetch(url, key), key)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", "TERM": "dumb"}
    target = {"codex": home / ".codex", "opencode": home / ".config" / "opencode"}.get(agent.name, home)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (target / name).write_text(text)
    task = prompt(agent.name)
    match agent.name:
        case "claude":
            environment |= _exports(files["claude.env"])
            permissions = ("--permission-mode", "default", "--allowedTools", "Read,Bash,Edit,Write")
            command = ["-p", *agent.options, task, *permissions, "--output-format", "json"]
        case "codex":
            environment |= {"CODEX_HOME": str(target), "FLARE_API_KEY": key or "any"}
            command = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task]
        case _:
            environment |= {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
            command = ["run", "--format", "json", task]
    return subprocess.run(
        [str(executable), *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def _exports(text: str) -> dict[str, str]:
    """The variables of a file of `export NAME=VALUE` lines."""
    lines = (line.removeprefix("export ") for line in text.splitlines() if line.startswith("export "))
    return {name: shlex.split(value)[0] for name, _, value in (line.partition("=") for line in lines)}
