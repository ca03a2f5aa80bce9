"""The commands on a tiny model: what they print, and that it is what the library says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from layermean import LayerMean
from longspool import LLM, __version__
from longspool.cli.main import app
from longspool.cli.show import size
from longspool.method import registry
from longspool.roles import SEATS

KEYS = {
    "text", "prompt_tokens", "completion_tokens", "finish_reason", "ttft_s", "prefill_tok_s", "decode_tok_s", "memory", "recipe", "actions",
    "kernels",
}  # fmt: skip
MEMORY = {"kv_bytes", "kv_peak_bytes", "kv_dense_bytes", "host_bytes", "disk_bytes", "rss_peak_bytes", "fitted_bytes"}
TEXT = "A spool winds a long thread onto a small core. " * 8
TOKEN_BYTES = 3 * 2 * 16 * 2 * 2  # layers, KV heads, dimensions, keys and values, bytes of fp16


def cli(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def told(*arguments: str, stdin: str = "") -> Any:
    result = cli(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def llm(tiny_dir: Path) -> LLM:
    return LLM(str(tiny_dir))


def asked(llm: LLM, content: str, **wishes: object) -> str:
    return llm.chat([{"role": "user", "content": content}], **wishes).text


# ---- run


def test_json_has_its_keys(tiny_dir: Path) -> None:
    facts = told("run", "-m", str(tiny_dir), "-p", "hi", "--max-tokens", "4", "--seed", "5", "--ignore-eos")
    assert set(facts) == KEYS | {"seed", "reused_tokens", "preempted", "notes"} and set(facts["memory"]) == MEMORY
    # 7 tokens of bytes and specials around "user\nhi", and the opening of the answer
    assert facts["prompt_tokens"] == len("<user\nhi>\n<assistant\n")
    assert (facts["completion_tokens"], facts["finish_reason"], facts["recipe"], facts["seed"]) == (4, "length", "dense", 5)
    assert facts["memory"]["kv_dense_bytes"] == (facts["prompt_tokens"] + 4) * TOKEN_BYTES
    assert facts["ttft_s"] > 0 and facts["prefill_tok_s"] == pytest.approx(facts["prompt_tokens"] / facts["ttft_s"])
    assert facts["actions"] == {} and facts["notes"] == [] and "attend_rows" in facts["kernels"]


def test_the_answer_is_the_librarys(tiny_dir: Path, llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("Second.")
    model, few = ("-m", str(tiny_dir)), ("--max-tokens", "12")
    both = ("-f", str(tmp_path / "a.txt"), "-f", str(tmp_path / "b.txt"))
    expected = asked(llm, f"{TEXT}\n\nSecond.\n\nWhy?", max_tokens=12)
    assert len(set(expected)) > 4
    assert told("run", *model, *both, "-p", "Why?", *few)["text"] == expected
    assert cli("run", *model, *both, "-p", "Why?", *few).stdout == expected + "\n"
    assert told("run", *model, *few, stdin=TEXT)["text"] == asked(llm, TEXT, max_tokens=12)
    assert told("run", *model, *few, "-p", "Why?", stdin=TEXT)["text"] == asked(llm, f"{TEXT}\n\nWhy?", max_tokens=12)
    assert told("run", *model, *few, "--raw", "-p", TEXT)["text"] == llm.generate(TEXT, max_tokens=12)[0].text


def test_flags_reach_the_engine(tiny_dir: Path, llm: LLM) -> None:
    base = ("run", "-m", str(tiny_dir), "-p", TEXT, "--max-tokens", "8")
    drawn = told(*base, "-t", "0.9", "--seed", "3", "-n", "3", "--logprobs", "2")
    prompt = llm.chat_ids([{"role": "user", "content": TEXT}])
    assert drawn["samples"] == [r.text for r in llm.generate(prompt, temperature=0.9, seed=3, n=3, max_tokens=8)]
    assert drawn["text"] == drawn["samples"][0] and len(set(drawn["samples"])) == 3
    assert len(drawn["logprobs"]) == drawn["completion_tokens"] and all(len(t["top"]) == 2 and t["logprob"] <= 0 for t in drawn["logprobs"])
    small = told(*base, "--recipe", "snapkv(budget=96, window=16) + int8(window=16)", "--kv", "f32", "--memory", "64MiB")
    assert small["recipe"] == "snapkv(budget=96, window=16) + int8(window=16)"
    assert [note.split(":")[0] for note in small["notes"]] == ["snapkv chose what to keep by the question in this prompt"]
    assert set(small["actions"]) == {"snapkv", "int8"} and small["memory"]["kv_bytes"] < small["memory"]["kv_dense_bytes"]


def test_several_answers_in_plain(tiny_dir: Path, llm: LLM) -> None:
    result = cli("run", "-m", str(tiny_dir), "-p", "hi", "--max-tokens", "5", "-t", "1", "--seed", "1", "-n", "2")
    texts = [r.text for r in llm.generate(llm.chat_ids([{"role": "user", "content": "hi"}]), temperature=1.0, seed=1, n=2, max_tokens=5)]
    assert result.stdout == f"[0] {texts[0]}\n\n[1] {texts[1]}\n"


def test_facts_go_to_stderr(tiny_dir: Path) -> None:
    result = cli("run", "-m", str(tiny_dir), "-p", "short", "--recipe", "snapkv", "--max-tokens", "3", "--seed", "11", "--ignore-eos")
    lines = " ".join(result.stderr.split())
    assert "recipe snapkv" in lines and "first token after" in lines and "3 tokens (" in lines and "seed 11" in lines
    assert "KV memory" in lines and "dense" in lines
    assert "Note: snapkv did nothing in this run" in lines


# ---- the other commands


def test_methods_are_the_registry() -> None:
    listed = told("methods")
    assert [m["name"] for m in listed] == list(registry())
    assert all(set(m) == {"name", "seat", "card", "paper", "identity", "exact", "question", "parameters"} for m in listed)
    by_name = {m["name"]: m for m in listed}
    assert by_name["snapkv"]["parameters"] == {"budget": 1024, "when": "prompt", "window": 64, "kernel": 5}
    assert by_name["snapkv"]["seat"] == "Evict" and not by_name["snapkv"]["exact"] and by_name["vericache"]["exact"]
    assert {name for name, m in by_name.items() if m["question"]} == {name for name, cls in registry().items() if cls.question}
    assert by_name["snapkv"]["question"] and by_name["adakv"]["question"] and not by_name["streaming"]["question"]
    assert {seat for m in listed for seat in m["seat"].split(", ")} <= {seat.__name__ for seat in SEATS}
    plain, table = cli("methods").stdout, cli("methods", "--markdown").stdout
    assert all(m["name"] in plain and f"| `{m['name']}` |" in table for m in listed)
    assert all(
        row in table for row in ("| `snapkv` | Evict |  | yes |", "| `streaming` | Admit |  |  |", "| `headinfer` | Place | yes |  |")
    )
    row = next(line for line in plain.splitlines() if line.startswith("snapkv"))
    assert row.split()[:3] == ["snapkv", "Evict", "yes"] and "question" in plain.splitlines()[0]


def test_info(tiny_dir: Path) -> None:
    facts = told("info", str(tiny_dir))
    assert facts["config"] | {"layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "context": 2048, "vocab": 258} == facts["config"]
    matrices = 2 * 258 * 64 + 3 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96)
    assert facts["load"]["parameters"] == matrices + 7 * 64
    assert facts["load"]["bytes_packed"] == 4 * facts["load"]["parameters"] and facts["load"]["path"] == str(tiny_dir)
    assert facts["kv"] == {"bytes_per_token": TOKEN_BYTES, "bytes_full_context": 2048 * TOKEN_BYTES}
    plain = cli("info", str(tiny_dir)).stdout
    assert f"{TOKEN_BYTES} bytes a token" in plain and size(2048 * TOKEN_BYTES) in plain
    assert told("info", str(tiny_dir), "--weights", "int8")["load"]["bytes_packed"] < facts["load"]["bytes_packed"] / 2


def test_check_needs_no_weights(tiny_dir: Path, tmp_path: Path) -> None:
    for file in tiny_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes() if file.suffix != ".safetensors" else file.read_bytes()[:4096])
    result = cli("check", "streaming(window=32) @ 1- + int4 + self_extend", "-m", str(tiny_dir))
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(line.startswith("all Position self_extend") for line in lines)
    assert "0-0 Encode int4 recent 64, keys bare" in lines
    assert "1-2 Admit streaming(window=32), Encode int4 recent 64, keys bare" in lines
    assert any(line.startswith("1,024 ") and line.endswith(size(1024 * TOKEN_BYTES)) for line in lines)
    assert "question" not in result.stdout
    told = "drops by the question at the prompt's end: a later question may miss what it dropped."
    asked = " ".join(cli("check", "adakv(snapkv) + streaming + int4", "-m", str(tiny_dir)).stdout.split())
    assert f"adakv {told}" in asked and asked.count("question") == 2
    dense = cli("check", "dense", "-m", str(tiny_dir)).stdout.splitlines()
    assert dense[0].startswith("dense on ") and dense[-1].split()[0] == "2,048" and dense[-1].endswith(size(2048 * TOKEN_BYTES))


def test_check_shows_which_layers_share_pages(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry(), "layermean", LayerMean)
    lines = [" ".join(line.split()) for line in cli("check", "layermean", "-m", str(tiny_dir)).stdout.splitlines()]
    assert "0-1 Encode layermean, layers 0, 1 share pages recent 64" in lines
    assert "2-2 Encode layermean recent 64" in lines


def test_version() -> None:
    assert cli("--version").stdout == f"longspool {__version__}\n"


# ---- bad input

BAD: dict[str, tuple[list[str], str]] = {
    "empty prompt": (["run", "-m", "{tiny}", "-p", " "], "The prompt is empty"),
    "too long": (["run", "-m", "{tiny}", "-f", "{long}"], "The prompt has 3019 tokens and with this recipe the model reads at most 2047"),
    "too long names the way out": (["run", "-m", "{tiny}", "-f", "{long}"], "extend the model's reach with: self_extend"),
    "small budget": (["run", "-m", "{tiny}", "-p", "hi", "--recipe", "snapkv(budget=40)"], "budget=40 tokens must be more than the 64"),
    "unknown method": (["run", "-m", "{tiny}", "-p", "hi", "--recipe", "snapvk"], "There is no method 'snapvk'; did you mean 'snapkv'?"),
    "two on a seat": (["check", "int4 + int8", "-m", "{tiny}"], "Encode takes one method, got int4 and int8."),
    "no text": (["run", "-m", "{tiny}", "-f", "{binary}"], "is not text: byte 0xff at offset 2"),
    "no file": (["run", "-m", "{tiny}", "-f", "{none}"], "There is no file"),
    "no model": (["run", "-m", "{none}", "-p", "hi"], "There is no model"),
    "no hub": (["info", "{none}.gguf"], "There is no model"),
    "cold": (["run", "-m", "{tiny}", "-p", "hi", "-t", "-0.5"], "temperature=-0.5 must be 0"),
    "no template": (["run", "-m", "{plain}", "-p", "hi"], "no chat template, so it takes plain prompts and no messages. Add --raw"),
    "logprobs alone": (["run", "-m", "{tiny}", "-p", "hi", "--logprobs", "2"], "add --json"),
    "strange storage": (["run", "-m", "{tiny}", "-p", "hi", "--kv", "f8"], "kv='f8' is none of f32, f16, bf16."),
    "strange storage to check": (["check", "int4", "-m", "{tiny}", "--kv", "f8"], "kv='f8' is none of"),
    "strange memory": (["run", "-m", "{tiny}", "-p", "hi", "--memory", "lots"], "'lots' is no amount of memory"),
    "little memory": (["run", "-m", "{tiny}", "-p", "hi", "--memory", "1KB"], "the budget is 1,000"),
    "strange weights": (["run", "-m", "{tiny}", "-p", "hi", "--weights", "int3"], "weights='int3' is not known"),
    "strange pull": (["pull", "gpt5"], "There is no built-in model 'gpt5'"),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_one_sentence(case: str, tiny_dir: Path, plain_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"ok\xff")
    (tmp_path / "long").write_text("x" * 3000)
    places = {"tiny": tiny_dir, "plain": plain_dir, "none": tmp_path / "none", "binary": tmp_path / "binary", "long": tmp_path / "long"}
    arguments, sentence = BAD[case]
    result = cli(*(a.format(**places) for a in arguments))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ") and sentence in result.stderr and len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_missing_builtin_names_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspool.model.pull.user_cache_dir", lambda name: str(tmp_path))
    for arguments in (("run", "-p", "hi"), ("check", "int4"), ("info", "smollm2"), ("chat",)):
        result = cli(*arguments)
        assert result.exit_code == 2 and "run `longspool pull smollm2`" in result.stderr and len(result.stderr.splitlines()) == 1


def test_every_refusal_is_told(tiny_dir: Path) -> None:
    result = cli("check", "int4 + int8 + snapkv(budget=10) + streaming @ 7-", "-m", str(tiny_dir))
    assert result.exit_code == 2
    reasons = (
        "Encode takes one method",
        "budget=10 tokens",
        "layers that this model of 3 layers does not have",
        "nearest sound recipe: int4",
    )
    assert all(reason in result.stderr for reason in reasons)
