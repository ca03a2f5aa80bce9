"""The harness itself: `pytest benchmarks`. Needs no peer; the prompts' test needs the built-in model and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import kernels, machine, peers, prompts, run, shape_1b, shape_model, store, table, worker
from longspool.bench.texts import english

MACHINE = {"processor": "P", "cores": 2, "instructions": "avx2", "memory_gib": 8, "system": "Linux 6", "python": "3.12"}
CEILING = {"read_gbs": 30.0, "sgemm_gflops": 150.0, "threads": 2}


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    monkeypatch.setattr(kernels, "RESULT", tmp_path / "kernels.json")
    monkeypatch.setattr(shape_1b, "RESULT", tmp_path / "shape-1b.json")
    return tmp_path


def put(when: str, peer: str, variant: str, ttft: list[float], task: str = "speed", length: str = "1k", **facts: object) -> None:
    repeats = [{"ttft_s": t, "decode_ms": [t, 3 * t, 2 * t], "peak_mb": 100 * t, "others": 0.0, "versions": {}} | facts for t in ttft]
    store.save(store.Run(when, "cmd", "abc", MACHINE, CEILING, "sha"), store.Row(when, peer, variant, task, length, repeats))


def test_a_row_replaces_the_older_one_and_its_run_goes_with_it() -> None:
    put("r1", "longspool", "dense", [1.0])
    put("r1", "longspool", "int8", [2.0])
    put("r2", "longspool", "dense", [3.0])
    runs, rows = store.load("longspool")
    assert set(runs) == {"r1", "r2"} and [(r.variant, r.run) for r in rows] == [("dense", "r2"), ("int8", "r1")]
    put("r2", "longspool", "int8", [4.0])
    assert set(store.load("longspool")[0]) == {"r2"}


def test_ratios_come_from_one_run_and_from_the_best_exact_variant() -> None:
    put("r1", "longspool", "dense", [2.0, 1.0, 3.0])
    put("r1", "llama_cpp", "plain", [8.0])
    put("r1", "llama_cpp", "flash", [5.0])
    put("r1", "llama_cpp", "flash-q8_0", [0.5])
    put("r0", "openvino", "default", [9.0])
    found = table.ratios(table.Results())
    assert "`dense` against llama.cpp | 2.50× | 2.50× | 2.50×" in found
    assert "OpenVINO" not in found


def test_the_table_marks_other_runs_and_disturbed_rows_and_names_what_is_missing() -> None:
    put("r1", "longspool", "dense", [2.0, 1.0, 3.0])
    put("r0", "llama_cpp", "plain", [8.0])
    put("r1", "llama_cpp", "flash", [5.0], others=0.7)
    put("r1", "openvino", "default", [1.0], missing="pip install openvino-genai")
    store.save(store.Run("r1", "c", "a", MACHINE, CEILING, "s"), store.Row("r1", "openvino", "default", "speed", "1k", [{"missing": "x"}]))
    text = table.text()
    assert "| **Longspool** `dense` | 2.00 (1.00–3.00) |" in text
    assert "| llama.cpp `plain` | 8.00† |" in text and "| llama.cpp `flash` | 5.00‡ |" in text
    assert "OpenVINO GenAI is not measured here; install it with `pip install openvino-genai`." in text
    assert "OpenVINO GenAI `default`" not in text


def test_agreement_is_the_share_of_equal_choices_or_where_greedy_answers_part() -> None:
    put("r1", "transformers", "fp32", [1.0], task="forced", tops=[1, 2, 3, 4])
    put("r1", "llama_cpp", "plain", [1.0], task="forced", tops=[1, 2, 9, 4], kl=[0.0, 0.1, 0.2, 0.1])
    put("r1", "transformers", "fp32", [1.0], tokens=[5, 6, 7, 8])
    put("r1", "openvino", "xattention", [1.0], tokens=[5, 6, 0, 8])
    found = table.Results()
    assert table.agreement(found, "llama_cpp", "plain", "1k") == "75.0%, KL 0.1"
    assert table.agreement(found, "openvino", "xattention", "1k") == "greedy equal up to token 2, 3 of 4"


def test_nearness_is_titled_by_what_was_measured_and_has_no_empty_columns() -> None:
    put("r1", "transformers", "fp32", [1.0], tokens=[5, 6, 7, 8])
    put("r1", "longspool", "dense", [1.0], tokens=[5, 6, 0, 8])
    put("r1", "longspool", "int8", [1.0], length="4k")
    caption, grid = table.fidelity(table.Results())
    assert caption == "Nearness to fp32 (greedy answers)"
    assert grid.splitlines()[0] == "|  | greedy, 1k |" and "int8" not in grid
    put("r1", "transformers", "fp32", [1.0], task="forced", tops=[1, 2])
    put("r1", "longspool", "int8", [1.0], task="forced", tops=[1, 3])
    put("r1", "longspool", "int8", [1.0], task="needle", length="4k", score=7)
    caption, grid = table.fidelity(table.Results())
    assert caption == "Nearness to fp32 (teacher-forced on real text, greedy answers) and needles found"
    assert grid.splitlines()[0] == "|  | top-1, 1k | needles, 4k |"
    assert "| **Longspool** `dense` | greedy equal up to token 2, 3 of 4 |  |" in grid
    assert "| **Longspool** `int8` | 50.0% | 7 of 10 |" in grid


def test_a_ratio_is_blank_only_where_runs_differ() -> None:
    put("r1", "longspool", "dense", [2.0])
    put("r1", "longspool", "dense", [2.0], length="4k")
    put("r1", "transformers", "fp32", [4.0], decode_ms=None)
    put("r0", "transformers", "fp32", [4.0], length="4k")
    put("r1", "llama_cpp", "plain", [6.0])
    put("r1", "llama_cpp", "plain", [6.0], length="4k")
    store.save(store.Run("r1", "c", "a", MACHINE, CEILING, "s"), store.Row("r1", "openvino", "sdpa", "speed", "1k", [{"failed": "x"}]))
    found = table.ratios(table.Results())
    assert "`dense` against Transformers | 2.00× |  | not measured |  | 2.00× |  |" in found
    assert "`dense` against llama.cpp | 3.00× | 3.00× | 3.00× | 3.00× | 3.00× | 3.00× |" in found
    assert "`dense` against OpenVINO GenAI | failed |  | failed |  | failed |  |" in found


def test_the_readme_needs_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"a\n{table.START}\nold\n{table.END}\nb\n")
    table.insert(page, "new")
    assert page.read_text() == f"a\n{table.START}\nnew\n{table.END}\nb\n"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="no place for the table"):
        table.insert(page, "new")


def test_dumped_results_read_back() -> None:
    content = {"a": [{"b": list(range(200)), "c": "é", "d": None}, {}], "e": {"f": [[1.5, 2], ["x" * 150]]}}
    assert json.loads(store.dump(content)) == content


def test_divergence_is_that_of_torch(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    truth, other = (rng.normal(size=(5, 40)).astype(np.float32) * 3 for _ in range(2))
    kept = tmp_path / "kept.npy"
    assert worker.divergence(other, kept, reference=False) is None
    assert max(worker.divergence(truth, kept, reference=True)) < 1e-6
    logp, logq = (torch.tensor(x, dtype=torch.float64).log_softmax(-1) for x in (truth, other))
    want = torch.nn.functional.kl_div(logq, logp, reduction="none", log_target=True).sum(-1)
    assert worker.divergence(other, kept, reference=False) == pytest.approx(want.tolist(), rel=1e-3)


@pytest.mark.parametrize(("text", "number"), [(" 4827163.", "4827163"), (": 12 34", "12"), ("none", ""), ("7-segment", "7")])
def test_first_number(text: str, number: str) -> None:
    assert worker.first_number(text) == number


def test_a_wrong_kernel_shows_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspool.kernels import op

    case = next(kernels.prefill([1024]))
    ref = op.implementation("attend_rows", "ref")

    class Wrong:
        change = 1.001

        @staticmethod
        def can(*args: object) -> None:
            return None

        @classmethod
        def run(cls, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = ref.run(*args)
            return out * cls.change, lse

    monkeypatch.setattr(op, "implementation", lambda name, kind: Wrong if kind == "cpu" else ref)
    for change in (1.001, float("nan")):
        Wrong.change = change
        timing = kernels.measure(case, machine.Ceiling(30.0, 150.0, 1))
        assert timing.error > 1 and timing.us == 0 and "differs" in kernels.line(timing)[-1]
    Wrong.change = 1.0
    assert kernels.gate(case)[1] == 0


def test_the_shape_files_weights_keep_activations_near_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    for name, value in (("LAYERS", 1), ("WIDTH", 128), ("HEADS", 2), ("KV", 1), ("FFN", 256), ("VOCAB", 320)):
        monkeypatch.setattr(shape_model, name, value)
    path = tmp_path / "m.gguf"
    shape_model.write_model(path)
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    down = gguf.quants.dequantize(tensors["blk.0.ffn_down.weight"].data, tensors["blk.0.ffn_down.weight"].tensor_type)
    assert down.shape == (128, 256) and down.std() * 256**0.5 == pytest.approx(1.0, rel=0.02) and abs(down.mean()) < 0.01
    assert len(tensors) == 1 + 9 + 1


def test_selections_are_checked() -> None:
    assert peers.variants(["llama_cpp/flash", "transformers"]) == [("llama_cpp", "flash"), ("transformers", "fp32")]
    with pytest.raises(SystemExit, match="no peer 'vllm'"):
        peers.variants(["vllm"])
    with pytest.raises(SystemExit, match="no variant 'fast'"):
        peers.variants(["llama_cpp/fast"])
    with pytest.raises(SystemExit):
        run.arguments(["--lengths", "3k"])
    rows = run.rows_of(run.arguments(["--peers", "longspool/dense,llama_cpp/plain", "--lengths", "1k,4k"]), "r")
    assert [(r.peer, r.task, r.length) for r in rows][-2:] == [("longspool", "needle", "4k"), ("llama_cpp", "needle", "4k")]
    assert len(rows) == 2 * (2 + 2 + 1)


@pytest.mark.real
def test_prompts_are_exact(tmp_path: Path) -> None:
    made = prompts.make(run.find_model(None))
    made.save(tmp_path / "p.json")
    again = prompts.read(tmp_path / "p.json")
    assert again == made and again.sha == made.sha
    assert len(made.forced(7680)) == prompts.FORCED and made.prompt(1024) == made.prompt(4096)[:1024]
    assert english().startswith(made.decode(made.prompt(200)))
    assert len({n.answer for n in made.needles}) == len(made.needles)
    for needle in made.needles:
        text = made.decode(needle.ids)
        assert len(needle.ids) == prompts.NEEDLE_LENGTH - prompts.ANSWER
        assert text.count(needle.answer) == 1 and abs(text.index(needle.answer) / len(text) - needle.depth) < 0.08
        assert text.endswith(f"The special magic number for {needle.key} mentioned in the provided text is")
