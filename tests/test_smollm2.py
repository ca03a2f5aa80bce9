"""The real model against transformers on the same GGUF file."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import pytest
import torch

from longspool import LLM

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> tuple[list[int], torch.Tensor]:
    """512 tokens of real English and transformers' fp32 logits for them."""
    from transformers import AutoModelForCausalLM

    ids = LLM("smollm2").tokenizer.encode("\n".join(pydoc_data.topics.topics.values()))[:512]
    peer = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32)
    with torch.no_grad():
        return ids, peer(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize(("prefill", "chunk"), [(512, 2048), (512, 100), (480, 2048)])
def test_logits_equal_those_of_transformers(reference: tuple[list[int], torch.Tensor], prefill: int, chunk: int) -> None:
    """Prefill in one piece, in chunks, and the last tokens decoded one by one, all in fp32."""
    ids, expected = reference
    difference, same = compare(LLM("smollm2", kv="f32", chunk=chunk).logits(ids, prefill), expected)
    assert difference < 1e-2
    assert same >= 0.995


def test_half_precision_storage_rounds_keys_and_values_only(reference: tuple[list[int], torch.Tensor]) -> None:
    """The default storage, fp16: eleven bits of keys and values move logits that spread over tens by a few hundredths at most."""
    ids, expected = reference
    difference, same = compare(LLM("smollm2").logits(ids), expected)
    assert difference < 5e-2
    assert same >= 0.995


def compare(logits: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """The largest difference, and the share of places with the same best token."""
    assert expected.std() > 1
    return float((logits - expected).abs().max()), float((logits.argmax(-1) == expected.argmax(-1)).float().mean())
