"""The command line. Commands import what they need when they run, so that `longspool --help` is there at once."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import __version__
from .guard import guarded
from .wishes import wishing

if TYPE_CHECKING:
    from ..engine.sampler import Sampling

app = typer.Typer(name="longspool", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

Model = Annotated[
    str, typer.Option("--model", "-m", metavar="MODEL", help="A built-in model, a GGUF file, a Hugging Face directory or hub name.")
]
Files = Annotated[
    list[Path] | None, typer.Option("--file", "-f", metavar="FILE", help="A long text to read; may be repeated, - is standard input.")
]
Recipe = Annotated[str, typer.Option("--recipe", "-r", help="The methods on the KV memory, for example 'snapkv(budget=1024) + int4'.")]
Memory = Annotated[str | None, typer.Option("--memory", help="The most KV memory, for example 8GiB; half of what is free by default.")]
Kv = Annotated[str, typer.Option("--kv", help="How raw keys and values are stored: f16, bf16 or f32.")]
Weights = Annotated[str | None, typer.Option("--weights", help="Pack the weights as int8, int4, f16, bf16 or f32; as stored by default.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def longspool(version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False) -> None:
    """Run language models on very long contexts with small memory."""
    if version:
        typer.echo(f"longspool {__version__}")
        raise typer.Exit


@app.command()
@guarded
@wishing()
def run(
    sampling: Sampling,
    model: Model = "smollm2",
    file: Files = None,
    question: Annotated[str, typer.Option("--prompt", "-p", help="The question; it follows the long text.")] = "",
    recipe: Recipe = "",
    memory: Memory = None,
    kv: Kv = "f16",
    weights: Weights = None,
    as_json: Json = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the model's chat format.")] = False,
) -> None:
    """Answer one prompt: a long text from files or standard input, a question, or both."""
    from . import answer, texts

    text = texts.joined(texts.context(file or []), question)
    answer.check(sampling, as_json)
    llm = answer.opened(model, recipe, memory, kv, weights)
    (answer.as_json if as_json else answer.printed)(llm, answer.tokens(llm, text, raw), sampling)


@app.command()
@guarded
@wishing("n", "logprobs")
def chat(
    sampling: Sampling,
    model: Model = "smollm2",
    file: Files = None,
    recipe: Recipe = "",
    memory: Memory = None,
    kv: Kv = "f16",
    weights: Weights = None,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, a second one leaves, and so does Ctrl-D."""
    from . import answer, talk, texts

    text = texts.context(file) if file else ""
    talk.talk(answer.opened(model, recipe, memory, kv, weights), sampling, text)


@app.command()
@guarded
def methods(
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of the documentation.")] = False,
) -> None:
    """List the methods a recipe may name."""
    from . import listing

    typer.echo(listing.as_json() if as_json else listing.markdown() if markdown else listing.plain(), nl=False)


@app.command()
@guarded
def info(model: Annotated[str, typer.Argument(help="As for run --model.")], weights: Weights = None, as_json: Json = False) -> None:
    """Load a model and say what it is and what its KV memory costs."""
    from . import about

    facts = about.facts(model, weights)
    typer.echo(json.dumps(facts, indent=2) if as_json else about.plain(facts))


@app.command()
@guarded
def check(recipe: Annotated[str, typer.Argument(help="The recipe.")], model: Model = "smollm2", kv: Kv = "f16") -> None:
    """Say what a recipe would do on a model, or every reason why it can't run. No weights are loaded."""
    from . import about

    typer.echo(about.plan(recipe, model, kv), nl=False)


@app.command()
@guarded
def fit(
    method: Annotated[str, typer.Argument(help="The method, with the parameters that shape it: million or 'million(dims=4)'.")],
    model: Model = "smollm2",
    tokens: Annotated[int, typer.Option("--tokens", help="How much text the model reads for it.")] = 8192,
    seed: Annotated[int, typer.Option("--seed", help="What is drawn at random for it, the text among it.")] = 0,
    file: Files = None,
    weights: Weights = None,
    as_json: Json = False,
) -> None:
    """Fit a method to a model, once; without a text, on the documentation that Python carries."""
    from . import fitted

    fitted.fit(method, model, weights, file or [], tokens, seed, as_json)


@app.command()
@guarded
def verify(
    slugs: Annotated[list[str] | None, typer.Argument(metavar="[SLUG ...]", help="The methods.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every method that says what it must show.")] = False,
    model: Model = "smollm2",
    texts: Annotated[int, typer.Option("--texts", help="How many real texts a divergence is averaged over.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Which places of the texts, which needles.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write a record of each method there, as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Show on a real model that methods do what their papers say: against dense, a blind control and the papers' rivals. The exit code is
    1 where one does not."""
    from . import proof

    if not proof.verified(slugs or [], every, model, texts, seed, out, as_json):
        raise typer.Exit(1)


@app.command()
@guarded
def pull(name: Annotated[str, typer.Argument(help="A built-in model: smollm2.")]) -> None:
    """Fetch a built-in model."""
    from ..model.pull import pull as fetch
    from .show import Bar

    with Bar(f"pulling {name}") as bar:
        path = fetch(name, bar.fraction)
    typer.echo(str(path))


def main() -> None:
    """The entry point. A character that the terminal can't show or send is no reason to stop."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="longspool")


if __name__ == "__main__":
    main()
