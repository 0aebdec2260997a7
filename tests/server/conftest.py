"""The server under test: FLARE_API_TEST_URL with FLARE_API_TEST_KEY, else one with a scripted model started here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.agent_script import script
from tests.support.live import Server, named, scripted


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = named()
    if found is not None:
        yield found
        return
    with scripted(tmp_path_factory.mktemp("server"), script(), "layout=compact") as started:
        yield started
