"""The README stays true: every setting is in its table, every file and module it names exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from pydantic import BaseModel

from serve_app.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_every_setting_is_documented_and_no_other() -> None:
    known: set[str] = set()
    for section, field in Settings.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type) and issubclass(kind, BaseModel)
        known |= {f"{section}.{name}" for name in kind.model_fields}
    sections = "|".join(Settings.model_fields)
    named = set(re.findall(rf"`({sections})\.(\w+)`", README))
    documented = {f"{section}.{name}" for section, name in named}
    sampling = {key for key in known if key.startswith("sampling.")}
    assert known - documented - sampling == set(), "settings missing from the README's table"
    assert documented - known == set(), "the README names settings that don't exist"
    for key in sampling:
        name = key.removeprefix("sampling.")
        assert f"`{name}`" in README or f"`{key}`" in README, f"{key} is missing from the README"


def test_modules_and_files_that_the_readme_names_exist() -> None:
    for module in set(re.findall(r"-m ((?:serve_app|benchmarks)[\w.]*)", README)):
        assert importlib.util.find_spec(module), module
    for path in set(re.findall(r"(?:cluster|tests|benchmarks|notebooks)/[\w/.-]+\.(?:yaml|py|sh|ipynb|json)", README)):
        assert (ROOT / path).exists(), path
