"""Methods that are fitted to a model: what `fit` sees, where it is kept, who finds it, and what is refused at the door."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from longspool import LLM
from longspool.engine.corpus import prose
from longspool.engine.fitting import FORMAT, Owner, keep
from longspool.engine.samples import Runs, cut
from longspool.errors import LongspoolError, MemoryFileError, ModelError, PlanError
from longspool.memory.file import load, save
from longspool.method import Method, Needs, Paper, registry
from longspool.roles import Admit, Decode, Encode, Field, Fitted, Request, Samples, Seen, Select, Store, View
from longspool.values import Rows, Shape, Span
from longspool.values.fit import Fit
from longspool.values.flow import Emit, Flow
from reference import dense_logits, rotate
from toolbox import KINDS, Fitting, Rig, loaded, model, words

N = 200
IDS = words(N + 20, 5)


@dataclass(frozen=True)
class Shifted(Fitted, Encode):
    """Keeps what differs from the mean key of each layer; `digits` shapes nothing but the numbers' rounding."""

    digits: int = 6
    window: int = 16
    slug: ClassVar[str] = "shifted"
    paper: ClassVar[Paper] = Paper("", "A toy", "none")
    identity: ClassVar[float] = 1e-3
    shaping: ClassVar[tuple[str, ...]] = ("digits",)

    def needs(self) -> Needs:
        return Needs(recent=self.window, keys="rotated", calibrated=("keys",))

    def fit(self, samples: Samples) -> dict[str, Tensor]:
        means = {f"{layer}.mean": samples.keys(layer).mean((0, 1)) for layer in samples.layers}
        return {name: (mean * 10**self.digits).round() / 10**self.digits for name, mean in means.items()} | {
            "seed": torch.tensor(samples.seed)
        }

    def fields(self, shape: Shape, page: int, layers: int) -> dict[str, Field]:
        return {"k": Field((shape.head_dim, page), torch.float32), "v": Field((page, shape.head_dim), torch.float32)}

    def write(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor, v: Tensor, span: Span) -> None:
        store["k"][pages] = k - store.fitted(self).of(span.layer, "mean").to(k.device)[:, None]
        store["v"][pages] = v

    def read(self, store: Store, pages: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        return store["k"][pages] + store.fitted(self).of(span.layer, "mean").to(store["k"].device)[:, None], store["v"][pages]


@dataclass(frozen=True)
class Looks(Fitted, Admit, Select, Decode):
    """Looks at what it was fitted to from three seats, and does nothing."""

    slug: ClassVar[str] = "looks"
    paper: ClassVar[Paper] = Paper("", "A toy", "none")
    identity: ClassVar[float] = 1e-3
    seen: ClassVar[set[str]] = set()

    def needs(self) -> Needs:
        return Needs(recent=16, calibrated=("values", "queries"))

    def fit(self, samples: Samples) -> dict[str, Tensor]:
        return {"one": samples.values(samples.layers[0])[0] + samples.queries(samples.layers[0])[0, 0]}

    def admit(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        assert view.fitted(self)["one"].numel()
        self.seen.add("admit")
        return torch.ones(pos.shape, dtype=torch.bool)

    def fields(self, shape: Shape, page: int) -> dict[str, Field]:
        return {"none": Field((1,), torch.float32)}

    def summarise(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor) -> None:
        assert store.fitted(self)["one"].numel()
        self.seen.add("summarise")

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        assert view.fitted(self)["one"].numel()
        self.seen.add("select")
        return Seen(rows)

    def flow(self, request: Request, reply: Tensor) -> Flow:
        assert request.fitted(self)["one"].numel()
        self.seen.add("flow")
        while (yield Emit(((choice := request.pick(reply)),))):
            reply = yield request.ask([choice.token], "decode")  # type: ignore[assignment]
        return None


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    registry().update({"shifted": Shifted, "looks": Looks})
    yield
    for name in ("shifted", "looks"):
        del registry()[name]


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return LLM(loaded(), kv="f32", memory="64MiB", cache_dir=tmp_path)


# ---- what a fit sees


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_the_models_own_vectors(kind: str) -> None:
    """Of two texts, each from position 0 on: a plain runner's."""
    of, texts = model(kind), [words(90, 1), words(40, 2)]
    runs = Runs(of, texts, ("keys", "bare", "values", "queries", "stream"), dtype=torch.float32)
    assert runs.layers == tuple(i for i, w in enumerate(of.shape.windows) if w is None)
    assert runs.pos.tolist() == [*range(90), *range(40)]
    found: dict[tuple[str, int], list[Tensor]] = {}
    for ids in texts:
        x, pos = of.embed(torch.tensor(ids)), torch.arange(len(ids))
        for layer, block in enumerate(of.blocks):
            from reference import attend

            q, bare, v = block.qkv(x)
            k = bare
            if block.rope is not None:
                angles = block.rope.angles(pos, len(ids))
                q, k = rotate(q, *angles), rotate(k, *angles)
            for name, part in (("keys", k), ("bare", bare), ("values", v), ("queries", q), ("stream", x)):
                found.setdefault((name, layer), []).append(part)
            x = block.finish(x, attend(of, layer, q, k, v))
    for (name, layer), parts in found.items():
        if layer in runs.layers:
            torch.testing.assert_close(getattr(runs, name)(layer), torch.cat(parts), atol=1e-4, rtol=0)


def test_what_is_not_declared_is_an_error_that_names_it() -> None:
    runs = Runs(model(), [words(40)], ("keys",))
    for look, name in ((lambda: runs.values(0), "values"), (lambda: runs.states(torch.tensor([1]), runs.attended), "model")):
        with pytest.raises(PlanError, match=rf"looks at {name} but does not declare Needs\(calibrated=\('{name}'"):
            look()


@pytest.mark.parametrize("kind", KINDS)
def test_the_differentiable_model_is_the_model(kind: str) -> None:
    of, ids = model(kind), torch.tensor(IDS[:100])
    states = Runs(of, [], ("model",)).states(ids, Runs(of, [], ()).attended)
    torch.testing.assert_close(of.logits(states.detach().clone()), dense_logits(of, ids), atol=2e-4, rtol=0)


def test_text_is_cut_to_what_a_model_reads() -> None:
    assert [len(p) for p in cut(list(range(10_000)), 5000, 4096)] == [2048, 2048, 904]
    assert [len(p) for p in cut(list(range(10_000)), 300, 128)] == [128, 128, 44]
    assert cut([1, 2, 3], 300, 128) == [[1, 2, 3]]


def test_pythons_documentation_is_english_and_drawn_by_the_seed() -> None:
    one, same, other = prose(20_000, 1), prose(20_000, 1), prose(20_000, 2)
    assert one == same != other and len(one) >= 20_000
    assert one.count(" the ") > 100
    with pytest.raises(LongspoolError, match="give texts with --file"):
        prose(1 << 40, 0)


# ---- where it is kept and who finds it


def test_is_kept_found_and_shared(llm: LLM, tmp_path: Path) -> None:
    done = llm.fit("shifted", tokens=300, seed=9)
    assert done.path == tmp_path / "fits" / "tiny" / "shifted,digits=6.safetensors" and done.path.is_file()
    assert (done.method, done.tokens, done.tensors, done.nbytes) == ("shifted", 300, 4, 3 * 16 * 4 + 8)
    with safe_open(done.path, "pt") as file:
        assert {"format": FORMAT, "method": "shifted", "model": "tiny", "parameters": "digits=6", "layers": "[0, 1, 2]"}.items() <= (
            file.metadata().items()
        )
        assert int(file.get_tensor("seed")) == 9
    again = LLM(loaded(), "shifted", kv="f32", memory="64MiB", cache_dir=tmp_path)
    results = [again.generate(IDS[:N], max_tokens=6, recipe=r)[0] for r in ("shifted", "shifted(window=40)", "shifted @ 1- + int8 @ 0", "")]
    assert len({id(fit) for fit in again.fits.values()}) == 1 and len(again.fits) == 2
    assert [r.report.memory.fitted_bytes for r in results] == [done.nbytes] * 3 + [0]
    assert results[0].tokens == results[3].tokens and results[0].report.actions["shifted"]["tokens"] > 0


def test_is_no_part_of_the_kv_bytes(tmp_path: Path) -> None:
    rig = Rig()
    memory = rig.read(rig.plan(Shifted(), torch.float16), IDS[:N])
    twin = memory.fork()
    assert memory.bytes == sum(z.bytes + z.side for layer in memory.layers for z in layer.zones)
    assert rig.pools.fits.of(memory.plan.methods) == rig.pools.fits.of(twin.plan.methods)
    memory.free()
    twin.free()
    assert not any(rig.pools.ledger.now.values())


def test_every_seat_sees_it() -> None:
    rig = Rig()
    request = rig.answer(rig.plan(Looks()), IDS[:N], max_tokens=4)
    assert request.error is None and Looks.seen == {"admit", "summarise", "select", "flow"}


def test_what_is_within_another_method_is_fitted_too(llm: LLM) -> None:
    with pytest.raises(PlanError, match="run `longspool fit shifted -m tiny`"):
        llm.generate(IDS[:N], recipe="vericache(shifted)")
    llm.fit("shifted", tokens=300)
    result = llm.generate(IDS[:N], recipe="vericache(shifted, horizon=4)", max_tokens=10)[0]
    assert result.report.memory.fitted_bytes > 0 and result.tokens == llm.generate(IDS[:N], max_tokens=10)[0].tokens


def test_a_memory_is_tied_to_what_its_methods_were_fitted_to(tmp_path: Path) -> None:
    rig, owner = Rig(), Owner("tiny", "tiny", tmp_path)
    rig.pools.fits[Shifted()] = Fit(rig.pools.fits[Shifted()].tensors, "first")
    plan = rig.plan(Shifted())
    memory = rig.read(plan, IDS[:N])
    save(memory, tmp_path / "memory", owner.fingerprint)
    again = load(tmp_path / "memory", plan, rig.pools, rig.engine._rotates, owner.fingerprint)
    assert torch.equal(rig.drip(again, IDS[N:]), rig.drip(memory, IDS[N:]))
    rig.pools.fits[Shifted()] = Fit(rig.pools.fits[Shifted()].tensors, "second")
    with pytest.raises(MemoryFileError, match="was saved with methods that were fitted as 'first', and this is 'second'"):
        load(tmp_path / "memory", plan, rig.pools, rig.engine._rotates, owner.fingerprint)


def test_a_new_fit_takes_the_old_ones_place(llm: LLM) -> None:
    llm.fit("shifted", tokens=300, seed=1)
    llm.generate(IDS[:N], recipe="shifted(window=8)", max_tokens=2)
    llm.fit("shifted", tokens=300, seed=2)
    assert {int(fit["seed"]) for fit in llm.fits.values()} == {2}
    llm.generate(IDS[:N], recipe="shifted(window=8)", max_tokens=2)
    assert {int(fit["seed"]) for fit in llm.fits.values()} == {2}


def test_a_text_of_ones_own(llm: LLM) -> None:
    text = "".join(map(chr, (i % 90 + 33 for i in range(500))))
    one, other = (llm.fit("shifted", text=t, tokens=400).path.read_bytes() for t in (text, text[::-1]))
    assert one != other
    with pytest.raises(LongspoolError, match="The text has 500 tokens and 501 are wanted"):
        llm.fit("shifted", text=text, tokens=501)


# ---- what is refused at the door


def refused(llm: LLM, recipe: str, error: type[LongspoolError], *said: str) -> None:
    before = dict(llm.fits)
    with pytest.raises(error) as caught:
        llm.plan_for(recipe)
    assert all(part in str(caught.value) for part in said), str(caught.value)
    assert str(caught.value).count("\n") == 0 and dict(llm.fits) == before


def test_missing(llm: LLM, tmp_path: Path) -> None:
    refused(llm, "shifted", PlanError, "shifted must be fitted to the model first", "run `longspool fit shifted -m tiny`.")
    refused(llm, "shifted(digits=3, window=7)", PlanError, 'run `longspool fit "shifted(digits=3)" -m tiny`.')
    elsewhere = tmp_path / "own.fit"
    refused(llm, f"shifted(file={str(elsewhere)!r})", PlanError, f"there is no file {elsewhere}", f"shifted(file='{elsewhere}')")
    with pytest.raises(PlanError, match="longspool fit looks") as caught:
        llm.plan_for("shifted + looks")
    assert len(caught.value.reasons) == 2, "all at once"
    with pytest.raises(PlanError, match="must be fitted"):
        LLM(loaded(), "shifted", cache_dir=tmp_path)


def test_a_file_of_ones_own(llm: LLM, tmp_path: Path) -> None:
    recipe = f"shifted(file={str(tmp_path / 'own.fit')!r})"
    assert llm.fit(recipe, tokens=300).path == tmp_path / "own.fit"
    assert llm.generate(IDS[:N], recipe=recipe, max_tokens=3)[0].report.memory.fitted_bytes > 0
    refused(llm, "shifted", PlanError, "must be fitted")


def test_damaged(llm: LLM) -> None:
    path = llm.fit("shifted", tokens=300).path
    whole, llm.fits = path.read_bytes(), type(llm.fits)()
    for at in (3, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        refused(llm, "shifted", ModelError, str(path))
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 4]))
    refused(llm, "shifted", ModelError, "is damaged: its content does not match its checksum.")
    path.write_bytes(b"")
    refused(llm, "shifted", ModelError, "damaged or no fitted file")
    path.write_bytes(whole.replace(FORMAT.encode(), b"longspool-fit-9"))
    refused(llm, "shifted", ModelError, "longspool-fit-9", FORMAT)


def test_of_another_model_or_other_parameters_or_another_method(llm: LLM, tmp_path: Path) -> None:
    path, shape = tmp_path / "own.fit", llm.model.shape
    method, owner = Shifted(file=str(path)), Owner("other", "other", tmp_path)
    tensors = Fitting(llm.model)[Shifted()].tensors
    keep(method, dict(tensors), shape, owner)
    refused(llm, str(method), PlanError, "was fitted to another model, other, and this one is tiny", "makes one that fits")
    keep(dataclasses.replace(method, digits=2), dict(tensors), shape, llm.owner)
    refused(llm, str(method), PlanError, "was fitted with the parameters digits=2, and these are digits=6")
    keep(Looks(file=str(path)), dict(tensors), shape, llm.owner)
    refused(llm, str(method), PlanError, "was fitted for the method looks, and this is shifted")
    keep(method, dict(tensors), shape, llm.owner)
    llm.plan_for(str(method))


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("int4", "'int4' names no method that is fitted to a model"),
        ("shifted + looks", "names 2 methods that are"),
        ("dense", "names no method"),
        ("shifted(digits='x')", "must be a whole number"),
    ],
)
def test_what_can_not_be_fitted(llm: LLM, recipe: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        llm.fit(recipe)
    with pytest.raises(LongspoolError, match="tokens=3 must be at least"):
        llm.fit("shifted", tokens=3)


def test_used_before_it_is_loaded() -> None:
    from longspool.memory import Fits

    rig = Rig(fits=Fits())
    with pytest.raises(LongspoolError, match="shifted is used before what it was fitted to was loaded"):
        rig.read(rig.plan(Shifted()), IDS[:N])


def test_methods_that_are_fitted_say_what_they_look_at() -> None:
    for name, cls in registry().items():
        if not cls.example:
            method = cls()
            assert isinstance(method, Method) and bool(method.needs().calibrated) == isinstance(method, Fitted), name
