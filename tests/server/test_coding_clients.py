"""Real coding agents do a task against a live server: read a file, mend it, run its tests, in a temporary repository.

    FLARE_API_TEST_URL=http://127.0.0.1:8000 FLARE_RUN_CLIENT_TESTS=1 \
        .venv/bin/python -m pytest tests/server/test_coding_clients.py -q

Without a URL a server with a scripted model is started. Binaries come from PATH or tests/server/install_clients.sh.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.agent_script import MODEL, check_command
from tests.support.clients import AGENTS, QUALIFIED, ROOT, Agent, binary, run, workspace
from tests.support.live import Server

pytestmark = [pytest.mark.clients, pytest.mark.graph]


@pytest.fixture(params=AGENTS, ids=str)
def agent(request: pytest.FixtureRequest) -> Agent:
    """Skips, before a server is started, what can't or shan't run here."""
    found: Agent = request.param
    if os.environ.get("FLARE_RUN_CLIENT_TESTS") != "1":
        pytest.skip("set FLARE_RUN_CLIENT_TESTS=1 to drive real coding agents")
    if binary(found.name) is None:
        pytest.skip(f"no {found.name} on PATH or in .clients/bin; run tests/server/install_clients.sh {found.name}")
    return found


def test_an_agent_reads_mends_and_tests(agent: Agent, server: Server, tmp_path: Path) -> None:
    executable = binary(agent.name)
    assert executable is not None
    folder = workspace(tmp_path / "repository", agent)
    done = run(agent, executable, server.url, server.key, folder, tmp_path / "home")
    account = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, account
    changed = subprocess.run(["git", "diff", "--name-only"], cwd=folder, capture_output=True, text=True, check=True)
    assert changed.stdout.split() == [f"calc_{agent.name}.py"], account
    tested = subprocess.run(check_command(agent.name).split(), cwd=folder, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stderr + account
    if server.card["id"] == MODEL:
        assert "The addition is mended" in account
    if agent.name == "claude":
        assert json.loads(done.stdout)["is_error"] is False


def test_the_installer_has_the_qualified_versions() -> None:
    text = (ROOT / "tests" / "server" / "install_clients.sh").read_text()
    pinned = {name.lower(): version for name, version in re.findall(r"\$\{(\w+)_VERSION:-([\d.]+)\}", text)}
    assert pinned == QUALIFIED
