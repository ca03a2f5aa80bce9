"""The tiny model without its chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def plain_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without its chat template."""
    path = tmp_path_factory.mktemp("models") / "plain"
    path.mkdir()
    for file in tiny_dir.iterdir():
        if file.suffix != ".jinja":
            (path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
