"""A plan fills seats per layer, merges needs, and refuses what can't run: all reasons at once, and the nearest sound recipe."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from layermean import LayerMean
from longspool.errors import PlanError
from longspool.method import Method, Needs
from longspool.plan import PAGE, Item, Plan, resolve
from longspool.recipe import parse
from longspool.roles import Encode, Evict, Select
from longspool.values import Shape
from toys import Every, Halve, Heavy, Leave, Pairs

SHAPE = Shape(4, 6, 2, 16, 96, 100, 4096, 0.25, (None,) * 4)
HYBRID = dataclasses.replace(SHAPE, windows=(32, None, 32, None))
SLIDING = dataclasses.replace(SHAPE, windows=(32,) * 4)


def plan(recipe: str, shape: Shape = SHAPE, *more: Method) -> Plan:
    return resolve((*parse(recipe), *map(Item, more)), shape)


def reasons(recipe: str, shape: Shape = SHAPE, *more: Method) -> tuple[str, ...]:
    with pytest.raises(PlanError) as error:
        plan(recipe, shape, *more)
    assert all(why.endswith(".") for why in error.value.reasons)
    return error.value.reasons


def test_fills_seats_layer_by_layer() -> None:
    made = plan("int8 @ 0-1 + int4 @ 2- + quest @ 3 + snapkv @ -2")
    seats = [tuple(m.slug for m in (p.one(Encode), p.one(Select), *p.chain(Evict)) if m is not None) for p in made.layers]  # type: ignore[attr-defined]
    assert seats == [("int8", "snapkv"), ("int8", "snapkv"), ("int4", "snapkv"), ("int4", "quest")]
    assert [p.page for p in made.layers] == [PAGE, PAGE, PAGE, 16]
    assert made.layers[0] is made.layers[1], "equal layers share one plan"
    assert str(made) == "int8 @ 0-1 + int4 @ 2- + quest @ 3-3 + snapkv @ 0-2"


def test_takes_the_maximum_of_needs() -> None:
    made = plan("snapkv(window=32) + int4(window=50)")
    assert made.layers[0].needs == Needs(recent=50, queries=32, keys="rotated")
    assert plan("vericache(snapkv(window=48), horizon=99)").layers[0].needs == Needs(recent=100, queries=48, keys="rotated", whole=True)
    assert resolve(parse("int4(window=5)"), SHAPE, base=Needs(recent=9)).layers[0].needs.recent == 9
    assert Needs(1, 2, 16, "bare", True).merge(Needs(3, 1, None, None, False, True, False, ("a",))) == Needs(
        3, 2, 16, "bare", True, True, False, ("a",)
    )
    with pytest.raises(PlanError, match=r"page=16.*page=32"):
        Needs(page=16).merge(Needs(page=32))


def test_equal_plans_are_one_key() -> None:
    assert plan("snapkv + int4") == plan("snapkv + int4") and hash(plan("snapkv + int4")) == hash(plan("snapkv + int4"))
    assert plan("snapkv + int4") != plan("int4 + snapkv")
    assert (
        len(
            {
                plan("int4"),
                resolve(parse("int4"), SHAPE, torch.float32),
                resolve(parse("int4"), SHAPE, base=Needs(recent=3)),
                plan("int4", HYBRID),
            }
        )
        == 4
    )


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("int8 + int4", "Encode takes one method, got int8 and int4."),
        ("quest + quest(budget=64)", "Select takes one method, got quest and quest."),
        ("self_extend + quest", "self_extend and quest don't fit: one method needs keys='bare' and another keys='rotated'."),
        ("self_extend + snapkv", "don't fit"),
        ("quest(page=16) + quest(page=32)", "page=16"),
        ("vericache(int4) + flashsampling", "vericache draws from whole logits, which flashsampling never makes."),
        (
            "vericache(int4) + snapkv",
            "vericache needs every token in its memory, and snapkv drops some; put snapkv inside: vericache(snapkv).",
        ),
        ("vericache(int4) + streaming", "put streaming inside"),
        ("vericache(quest) + self_extend", "don't fit"),
        ("vericache(int4 + int8)", "vericache: Encode takes one method, got int4 and int8."),
        ("vericache(snapkv(budget=3))", "vericache: snapkv: budget=3 tokens must be more than the 64"),
        ("vericache", "it drafts on a compressed memory"),
        ("vericache(flashsampling)", "flashsampling does not compress"),
        ("vericache(vericache(int4))", "vericache does not compress"),
        ("adakv(int4)", "it wraps an evictor by score such as snapkv, not int4."),
        ("adakv(snapkv(kernel=2))", "adakv: snapkv: kernel=2 must be an odd number"),
        ("int4 @ 4-", "int4 @ 4- names layers that this model of 4 layers does not have."),
        ("int4 @ 2-7", "names layers"),
        ("int4 @ 3-1", "ends before it begins"),
        ("self_extend @ 2-", "serves the whole model and can't be limited"),
        ("flashsampling @ 1", "serves the whole model"),
        ("snapkv(budget='5 apples')", "is neither tokens (1024) nor a ratio ('30%') nor bytes ('2GiB')"),
        ("snapkv(budget='0%')", "must be above 0%"),
        ("snapkv(budget=0)", "must be more than"),
        ("snapkv(when='often')", "when='often' must be"),
        ("snapkv(when=0)", "when=0 must be"),
        ("snapkv(when=-3)", "when=-3 must be"),
        ("snapkv(window=0)", "window=0"),
        ("streaming(sinks=-1)", "sinks=-1"),
        ("streaming(window=0)", "window=0"),
        ("int8(window=-1)", "window=-1"),
        ("quest(page=20)", "page=20 must be 16, 32, 64 or 128"),
        ("quest(budget=63)", "budget=63 must be at least 64"),
        ("quest(dense=-1)", "dense=-1"),
        ("headinfer(heads=3)", "heads=3 must be between 1 and the model's 2 KV heads."),
        ("headinfer(window=-1)", "window=-1"),
        ("trianglemix(block=8)", "block=8 must be at least 16."),
        ("self_extend(window=4096)", "window=4096"),
        ("self_extend(group=0)", "group=0"),
        ("vericache(int4, horizon=0)", "horizon=0"),
        ("adakv(snapkv, floor=1.5)", "floor=1.5"),
    ],
)
def test_refuses_with_a_sentence(recipe: str, said: str) -> None:
    assert any(said in why for why in reasons(recipe)), reasons(recipe)


def test_refuses_between_seats_whoever_sits_on_them() -> None:
    assert any("without the weights" in why for why in reasons("trianglemix", SHAPE, Pairs()))
    assert any("put every inside" in why for why in reasons("vericache(int4)", SHAPE, Every()))
    plan("trianglemix + snapkv", SHAPE, Every())


def test_layers_that_share_pages_hold_the_same_tokens() -> None:
    codec = LayerMean(2)
    said = "layermean stores 2 layers in the same pages, so they must hold the same tokens, and {} chooses layer by "
    said += "layer; give the two different layers."
    assert said.format("snapkv") in reasons("snapkv", SHAPE, codec)
    assert said.format("streaming") in reasons("streaming", SHAPE, codec)
    assert "vericache: " + said.format("every") in reasons("", SHAPE, drafting(codec, Every()))
    made = resolve((*parse("snapkv @ 0-1"), Item(codec, 2)), SHAPE)
    assert [p.joint for p in made.layers] == [(), (), (2, 3), (2, 3)]
    resolve((*parse("snapkv"), Item(LayerMean(1))), SHAPE)


def drafting(*inner: Method) -> Method:
    return dataclasses.replace(parse("vericache(int8)")[0].method, inner=inner)  # type: ignore[call-arg]


def test_tells_every_reason_and_the_nearest_sound_recipe() -> None:
    with pytest.raises(PlanError) as error:
        plan("snapkv(budget=3) + int8 + int4 + quest @ 9- + streaming + self_extend")
    said = " ".join(error.value.reasons)
    assert all(part in said for part in ("budget=3", "int8 and int4", "layers that this model", "self_extend"))
    assert str(error.value).endswith("The nearest sound recipe: int8 + streaming + self_extend")
    with pytest.raises(PlanError, match=r"nearest sound recipe: dense$"):
        plan("int4 @ 9")


def test_methods_on_different_layers_do_not_meet() -> None:
    plan("int8 @ 0-1 + int4 @ 2-")
    plan("quest(page=16) @ 0-1 + quest(page=32) @ 2-")
    assert reasons("int8 @ 0-2 + int4 @ 2-")


def test_sliding_layers_are_left_alone() -> None:
    made = plan("snapkv + int4 + trianglemix", HYBRID)
    assert [len(p.methods) for p in made.layers] == [0, 3, 0, 3]
    assert [p.bare for p in plan("self_extend", HYBRID).layers] == [False, True, False, True]
    assert plan("self_extend(window=1024, group=2)", HYBRID).context == (4096 - 1024) * 2 + 1024
    for recipe in ("snapkv", "int4", "quest", "headinfer", "self_extend", "vericache(int4)", "streaming", "trianglemix"):
        assert any("sliding window" in why for why in reasons(recipe, SLIDING))
    assert plan("flashsampling", SLIDING).layers[0].window == 32


def test_layers_after_a_pruned_one_store_positions() -> None:
    made = resolve((Item(Halve(), 1, 1), *parse("int8")), SHAPE)
    assert [p.ragged for p in made.layers] == [False, True, True, True]


def test_knows_which_plans_read_and_decode_alike() -> None:
    alike = {
        r: plan(r).uniform
        for r in ("", "headinfer", "flashsampling", "self_extend", "vericache(int4)", "int8", "snapkv", "quest", "trianglemix")
    }
    assert [r for r, same in alike.items() if same] == ["", "headinfer", "flashsampling", "self_extend", "vericache(int4)"]
    assert not plan("", SHAPE, Leave()).uniform


@pytest.mark.parametrize("recipe", ["leoam", "shadowkv", "hgca"])
def test_a_place_that_selects_is_not_uniform(recipe: str) -> None:
    """What it reads while decoding is not what reading the same tokens as a prompt reads."""
    assert not plan(recipe).uniform and plan("headinfer").uniform


def test_plain_plans_are_recognised() -> None:
    assert plan("").layers[0].plain and plan("flashsampling").layers[0].plain and plan("vericache(int4)").layers[0].plain
    for more in (plan("int8"), plan("self_extend"), plan("trianglemix"), plan("", SHAPE, Heavy())):
        assert not more.layers[0].plain
