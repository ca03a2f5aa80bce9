"""Memory on the disk, with the real model: what the device holds, and that tiers change no token."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import pytest

from longspool import LLM
from longspool.memory import dense_bytes
from longspool.methods.place.leoam import LeoAM

pytestmark = [pytest.mark.real, pytest.mark.slow]
TEXT = "\n".join(pydoc_data.topics.topics.values())
RECIPE = "leoam(budget=512)"


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> LLM:
    return LLM("smollm2", memory="2GiB")


def test_the_device_holds_a_seventh_of_a_dense_cache(llm: LLM) -> None:
    """At most 15% while 7,500 tokens are remembered and 16 more are decoded; a step reads a small part of what is stored."""
    ids = llm.tokenizer.encode(TEXT)[:7500]
    assert len(ids) == 7500
    (request,) = llm.requests(ids, None, RECIPE, max_tokens=16, temperature=0.0)
    llm.engine.submit(request)
    while not request.choices:
        llm.engine.step()
    ledger = llm.engine.pools.ledger
    ledger.mark()
    while not request.done:
        llm.engine.step()
    assert request.error is None and ledger.peak["device"] <= 0.15 * dense_bytes(request.plan, len(ids) + 16)
    did = request.actions["leoam"]
    assert did["tokens_read"] < 0.1 * did["tokens_stored"] and did["device_hits"] > did["device_misses"]


def test_tiers_change_no_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = llm.tokenizer.encode(TEXT)[:1500]
    wishes = {"recipe": "leoam(budget=256, device=128, host=512)", "max_tokens": 24, "temperature": 0.0}
    away = llm.generate(ids, **wishes)[0]
    assert away.report.memory.disk_bytes > 0
    monkeypatch.setattr(LeoAM, "home", "device")
    near = llm.generate(ids, **wishes)[0]
    assert near.tokens == away.tokens and near.report.memory.disk_bytes == 0
