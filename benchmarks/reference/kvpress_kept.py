"""Which tokens kvpress keeps of a real prompt: small files that our tests compare with.

kvpress pins a transformers of its own, so it runs in an environment of its own:

    python -m venv /tmp/kvpress && /tmp/kvpress/bin/pip install kvpress gguf
    longspool pull smollm2
    /tmp/kvpress/bin/python benchmarks/reference/kvpress_kept.py ~/.cache/longspool/models/smollm2.gguf

For every press, layer and KV head the kept positions are written as a hexadecimal bit mask, position 0 first.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import kvpress
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

TOKENS, RATIO = 1024, 0.75
LAYERS = (0, 7, 15, 22, 29)
OUT = Path(__file__).resolve().parent / "kvpress_kept.json"
PRESSES: dict[str, Callable[[], object]] = {
    "snapkv": lambda: kvpress.SnapKVPress(RATIO, window_size=64, kernel_size=5),
    "tova": lambda: kvpress.TOVAPress(RATIO),
    "knorm": lambda: kvpress.KnormPress(RATIO),
    "keydiff": lambda: kvpress.KeyDiffPress(RATIO),
    "chunkkv": lambda: kvpress.ChunkKVPress(kvpress.SnapKVPress(RATIO, window_size=64, kernel_size=5), chunk_length=16),
    "pyramidkv": lambda: kvpress.PyramidKVPress(RATIO, window_size=64, kernel_size=5, beta=20),
    "adakv": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(RATIO, window_size=64, kernel_size=5), alpha_safeguard=0.2),
    "h2o": lambda: kvpress.ObservedAttentionPress(RATIO),
}


def english() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def kept(model: torch.nn.Module, ids: torch.Tensor, press: object) -> dict[int, list[list[int]]]:
    """Positions per layer and KV head: those whose keys a press hands on, or does not mask."""
    found: dict[int, list[list[int]]] = {}
    compress = press.compress  # type: ignore[attr-defined]

    def watched(module, hidden_states, keys, values, attentions, kwargs):  # type: ignore[no-untyped-def]
        new_k, new_v = compress(module, hidden_states, keys, values, attentions, kwargs)
        masked = getattr(module, "masked_key_indices", None)
        rows = []
        for head in range(keys.shape[1]):
            if masked is not None and new_k.shape == keys.shape:
                gone = set(masked[2][masked[1] == head].tolist())
                rows.append([p for p in range(keys.shape[2]) if p not in gone])
            else:
                same = (keys[0, head][:, None] == new_k[0, head][None]).all(-1)
                rows.append(same.any(1).nonzero()[:, 0].tolist())
        found[module.layer_idx] = rows
        return new_k, new_v

    press.compress = watched  # type: ignore[attr-defined]
    with torch.no_grad(), press(model):  # type: ignore[operator]
        model(ids, past_key_values=DynamicCache(), use_cache=True)
    return found


def mask(positions: list[int]) -> str:
    bits = 0
    for p in positions:
        bits |= 1 << (TOKENS - 1 - p)
    return f"{bits:0{TOKENS // 4}x}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    path = parser.parse_args().gguf
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids = tokenizer(english(), add_special_tokens=False, return_tensors="pt")["input_ids"][:, :TOKENS]
    result: dict[str, object] = {
        "kvpress": importlib.metadata.version("kvpress"),
        "transformers": importlib.metadata.version("transformers"),
        "ids": ids[0].tolist(),
        "ratio": RATIO,
        "kept": {},
    }
    for name, make in PRESSES.items():
        how = "eager" if name in ("h2o",) else "sdpa"
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation=how).eval()
        found = kept(model, ids, make())
        result["kept"][name] = {str(layer): [mask(row) for row in found[layer]] for layer in LAYERS}  # type: ignore[index]
        print(name, {layer: [len(row) for row in found[layer]] for layer in LAYERS}, flush=True)
    OUT.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
