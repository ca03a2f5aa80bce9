"""MILLION: k-means against a plain one, nearest codes, and attention over codes that equals a float64 runner's on decoded tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from longspool.errors import PlanError
from longspool.memory import Fits, Ledger, Pool
from longspool.methods.encode.base import kmeans
from longspool.methods.encode.million import CODES, Million
from longspool.plan import Item, resolve
from longspool.values import Shape, Span
from longspool.values.fit import Fit
from reference import dense_logits
from toolbox import Job, Rig, Trace, causal, fitted, masked_logits, model, words

SHAPE = Shape(1, 4, 2, 16, 32, 10, 4096, 1.0, (None,))
PAGE, N = 64, 200
IDS = words(N + 40, 8)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def store(method: Million, books: dict[str, Tensor]) -> Pool:
    fits = Fits({method: Fit(books)})
    return Pool(method.fields(SHAPE, PAGE, 1), PAGE, "device", Ledger(), 1 << 16, fits=fits)


@pytest.mark.parametrize("dims", [1, 2, 4])
def test_a_code_is_the_nearest_vector_of_its_piece(dims: int) -> None:
    method, pieces = Million(dims), 16 // dims
    books = {f"0.{name}": noise(i, pieces, dims, CODES) for i, name in enumerate("kv")}
    pool = store(method, books)
    pages = torch.from_numpy(pool.take(2)).long()
    k, v = noise(3, 2, 16, PAGE), noise(4, 2, PAGE, 16)
    method.write(pool, pages, torch.tensor([PAGE, 9], dtype=torch.int32), k, v, Span((0,)))
    back = method.read(pool, pages, Span((0,)))
    for name, x, read in (("k", k.transpose(1, 2), back[0].transpose(1, 2)), ("v", v, back[1])):
        vectors, book = x.reshape(-1, pieces, dims).double().numpy(), books[f"0.{name}"].double().numpy()
        distance = ((vectors[:, :, :, None] - book[None]) ** 2).sum(2)
        best = distance.argmin(-1)
        codes = pool[name][pages].permute(0, 2, 1).reshape(-1, pieces).numpy()
        assert (codes == best).mean() > 0.999, "but for ties in the last digit"
        found = np.stack([book[m][:, codes[:, m]].T for m in range(pieces)], 1)
        np.testing.assert_allclose(read.reshape(-1, pieces, dims).numpy(), found, atol=1e-6)


def test_as_many_vectors_as_there_are_pieces_lose_nothing() -> None:
    x = noise(5, 3, 40, 2).repeat(1, 4, 1)
    books = kmeans(x, CODES, torch.Generator().manual_seed(0))
    for s in range(3):
        assert {tuple(row) for row in x[s].tolist()} <= {tuple(row) for row in books[s].tolist()}


def test_kmeans_is_where_lloyds_rounds_end() -> None:
    """Means lie in the middle of what is nearest to them, or near it after ten rounds, and lose far less than vectors taken at random."""
    x = noise(6, 2, 4000, 2)
    means = kmeans(x, 64, torch.Generator().manual_seed(1))
    for s in range(2):
        far = torch.cdist(x[s].double(), means[s].double())
        loss, code = far.square().min(1)
        blind = torch.cdist(x[s], x[s][torch.randperm(4000, generator=torch.Generator().manual_seed(2))[:64]]).square().amin(1)
        assert float(loss.mean()) < 0.75 * float(blind.mean())
        for c in range(64):
            own = x[s][code == c]
            assert len(own) and float((own.mean(0) - means[s, c]).norm()) < 0.12


def test_a_fit_has_a_book_of_each_layer() -> None:
    fit = fitted(model(), Million(4))
    assert {name: tuple(t.shape) for name, t in fit.tensors.items()} == {f"{layer}.{n}": (4, 4, CODES) for layer in range(3) for n in "kv"}
    assert not torch.equal(fit.of(0, "k"), fit.of(1, "k")) and not torch.equal(fit.of(0, "k"), fit.of(0, "v"))
    sliding = fitted(model("gemma3"), Million(4))
    assert {name.split(".")[0] for name in sliding.tensors} == {"2"}, "windowed layers have none"


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("chunk", [N, 64])
def test_attention_over_codes_is_attention_over_their_vectors(kind: str, chunk: int) -> None:
    """What has settled is seen as its nearest vectors, by a prompt's later chunks (decoded) and by new tokens (looked up)."""
    rig = Rig(kind)
    logits, memory = rig.run(Job(rig.plan("million(window=16)"), IDS, N, chunk))
    fit, shape = rig.engine.pools.fits[Million(window=16)], rig.model.shape

    def settled(token: int) -> int:
        """How many tokens have settled before a token's step."""
        seen = token // chunk * chunk if token < N else token
        held = 0
        for end in [*range(chunk, seen + 1, chunk), *([seen] if seen > N else [])] if seen <= N else [N, *range(N, seen + 1)]:
            if end - 16 - held >= 64:
                held += (end - 16 - held) // 64 * 64
        return held

    def coded(layer: int, name: str, x: Tensor) -> Tensor:
        """The stored vectors of the tokens that settled in the end: the nearest ones, but where two are as near but for rounding."""
        book = fit.of(layer, name).double()  # [M, dims, C]
        pieces = x.reshape(len(x), x.shape[1], book.shape[0], -1)
        best = ((pieces[..., None] - book) ** 2).sum(3).argmin(-1)
        nearest = torch.stack([book[m][:, best[..., m]].permute(1, 2, 0) for m in range(book.shape[0])], 2).flatten(2)
        stored = torch.stack([pair["kv".index(name)].double() for pair in memory[layer].read_settled()], 1)
        assert float(((stored - nearest[: len(stored)]).abs() > 1e-5).double().mean()) < 2e-3
        return torch.cat([stored, nearest[len(stored) :]])

    bounds = torch.tensor([settled(t) for t in range(len(IDS))])
    expected = runner(rig, bounds, coded)
    assert bounds[-1] == 192 and (chunk == N or bounds[N - 1] > 0)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    dense = dense_logits(rig.model, torch.tensor(IDS))
    assert float((logits - dense)[N:].abs().max()) > 0.05, "the loss is seen"
    if kind == "llama":
        assert memory.actions["million"]["tokens"] == 192 * 2 * shape.layers


def runner(rig: Rig, bounds: Tensor, coded: object) -> Tensor:
    """A float64 attention runner in which token t sees tokens below bounds[t] coded."""
    from reference import rotate

    of, shape, n = rig.model, rig.model.shape, len(IDS)
    x, pos = of.embed(torch.tensor(IDS)), torch.arange(n)
    with torch.no_grad():
        for layer, block in enumerate(of.blocks):
            q, k, v = block.qkv(x)
            if block.rope is not None:
                angles = block.rope.angles(pos, n)
                q, k = rotate(q, *angles), rotate(k, *angles)
            k, v, window = k.double(), v.double(), shape.windows[layer]
            pairs = [(k, v)] if window else [(k, v), (coded(layer, "k", k), coded(layer, "v", v))]  # type: ignore[operator]
            old = torch.zeros(n, n, dtype=torch.bool) if window else pos[None] < bounds[:, None]
            out = []
            for h in range(shape.heads):
                logits = []
                for keys, values in pairs:
                    s = Trace(q.double(), keys, values).logits(shape, slice(None), h)
                    logits.append(s)
                s = torch.where(old, logits[-1], logits[0]).masked_fill(~causal(n, window), -torch.inf)
                p = s.softmax(-1)
                r = h // shape.group
                out.append(p.masked_fill(old, 0) @ pairs[0][1][:, r] + p.masked_fill(~old, 0) @ pairs[-1][1][:, r])
            x = block.finish(x, torch.stack(out, 1).float())
    return of.logits(of.final(x))


def test_loses_less_the_more_bits_it_has() -> None:
    rig, dense = Rig(), dense_logits(model(), torch.tensor(IDS))
    errors = [float((rig.run(Job(rig.plan(f"million(dims={d}, window=16)"), IDS, N))[0] - dense)[N:].norm()) for d in (1, 2, 4, 8)]
    assert errors == sorted(errors) and errors[0] < 0.3 * errors[3]


def test_everything_in_the_window_is_dense() -> None:
    rig = Rig()
    logits, _ = rig.run(Job(rig.plan("million(window=1000)"), IDS, N))
    torch.testing.assert_close(logits, masked_logits(rig.model, IDS, lambda layer, trace: causal(len(IDS)))[0], atol=1e-4, rtol=0)


def test_takes_a_byte_a_piece() -> None:
    rig = Rig()
    memory = rig.read(rig.plan("million(dims=4, window=0)", torch.float16), words(192))
    assert [z.bytes for z in (layer.settled for layer in memory.layers) if z is not None] == [2 * 192 * 2 * 4] * 3


def test_shape_is_what_a_fit_depends_on() -> None:
    assert Million(window=3).mould() == Million(window=4).mould() != Million(4).mould()
    with pytest.raises(PlanError, match=r"dims=3 must divide the model's head_dim of 16\."):
        resolve((Item(Million(3)),), SHAPE)
    assert dataclasses.replace(Million(), file="x").mould() != Million().mould()
