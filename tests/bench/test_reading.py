"""A text under a recipe: the short way over the dense memory gives what the recipe gives when it reads by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import kl_div

from longspool import LLM
from longspool.bench.quality import Mean, gain, quality
from longspool.bench.reading import Reading
from longspool.bench.texts import Text, prose

LATE = ["dense", "snapkv(budget=96, window=16)", "quest(budget=96)", "int4(window=0)", "streaming(sinks=4, window=60)", "headinfer"]
EARLY = ["trianglemix(dense=1, window=64, last=16)", "self_extend(group=4, window=64)"]


@pytest.fixture(scope="module")
def llm(tiny_dir: Path) -> LLM:
    return LLM(str(tiny_dir))


@pytest.fixture(scope="module")
def text(llm: LLM) -> Text:
    (one,) = prose(llm.tokenizer, 1, 400, 12, seed=0)
    return one


@pytest.mark.parametrize("recipe", LATE + EARLY)
def test_it_is_what_the_recipe_gives(llm: LLM, text: Text, recipe: str) -> None:
    """`LLM.logits` reads prompts itself, here in one piece."""
    assert llm.plan_for(recipe).late == (recipe in LATE)
    reading = Reading(llm, text)
    run, again = reading.under(recipe), reading.under(recipe)
    expected = llm.logits(list(text.ids), text.prompt, recipe=recipe)[text.scored - 1 : -1]
    torch.testing.assert_close(run.logits, expected, atol=1e-4, rtol=0)
    assert torch.equal(run.logits, again.logits) and len(run.steps) == 11 and min(run.steps) > 0
    reading.close()
    assert not any(llm.engine.pools.ledger.now.values())


def test_chunks_are_read_in_chunks(llm: LLM, text: Text) -> None:
    """A codec is seen by later chunks, so the answer differs from that of one piece."""
    chunked = LLM(llm.loaded, chunk=100)
    reading = Reading(llm, text)
    run, whole = reading.under("int4(window=0)", 100), reading.under("int4(window=0)")
    expected = chunked.logits(list(text.ids), text.prompt, recipe="int4(window=0)")[text.scored - 1 : -1]
    torch.testing.assert_close(run.logits, expected, atol=1e-4, rtol=0)
    assert (run.logits - whole.logits).abs().max() > 1e-2
    reading.close()


def test_only_what_is_scored_counts(llm: LLM, text: Text) -> None:
    late = Text(text.ids, text.prompt, text.prompt + 5)
    a, b = Reading(llm, text), Reading(llm, late)
    torch.testing.assert_close(b.under("dense").logits, a.under("dense").logits[5:])
    a.close(), b.close()


def test_bytes_and_counters(llm: LLM, text: Text) -> None:
    reading = Reading(llm, text)
    run = reading.under("snapkv(budget=96, window=16)")
    assert run.kept == 96 * 3 * 2 and run.dense == 400 * 3 * 2 * 16 * 2 * 2 and run.actions["snapkv"]["evicted"] == (400 - 96) * 3 * 2
    # Three pages of 64 tokens a row, each with its positions, and small tables.
    assert 3 * 64 / 400 < run.share < 1.1 * 3 * 64 / 400 and 1 < reading.under("dense").share < 1.2
    reading.close()


def test_quality_is_torchs_divergence(llm: LLM, text: Text) -> None:
    reading = Reading(llm, text)
    run, dense = reading.under("streaming(sinks=4, window=60)"), reading.under("dense")
    found = quality(text, run, dense)
    mine, theirs = run.logits.double().log_softmax(-1), dense.logits.double().log_softmax(-1)
    given = torch.tensor(text.ids[400:])
    assert found.kl == pytest.approx(float(kl_div(mine, theirs, reduction="batchmean", log_target=True))) and found.kl > 1e-3
    assert found.nll == pytest.approx(float(torch.nn.functional.cross_entropy(run.logits.double(), given)))
    assert found.top1 == pytest.approx(float((mine.argmax(-1) == theirs.argmax(-1)).double().mean())) and 0 < found.top1 < 1
    same = quality(text, dense, dense)
    assert (same.kl, same.top1) == (0, 1) and not same.found
    told = Text((*text.ids[:400], *dense.logits[:1].argmax(-1).tolist()), 400, 400)
    first = Reading(llm, told)
    assert quality(told, first.under("dense"), first.under("dense")).found
    reading.close(), first.close()


def test_a_gain_is_paired() -> None:
    """Texts differ far more than the methods do; against each other they are clear."""
    control, method = [1.0, 5.0, 9.0, 2.0], [0.9, 4.8, 8.9, 1.8]
    assert gain(control, method).clear and not gain(method, control).clear and not Mean.of([1.0, -1.0, 1.0]).clear
    assert gain(control, method).mean == pytest.approx(0.15) and gain(control, method).error == pytest.approx(0.0288675)
    assert not gain(control, control).clear and not Mean.of([3.0]).clear
