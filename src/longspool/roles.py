"""The seats. Each is a small class with one verb; a method fills one or more of them and the engine calls nothing else.

Shape letters: B requests, N new tokens, T stored tokens, H query heads, R rows (requests x KV heads), D head dim, P pages,
W tokens of a page, M model width, V vocabulary. Tensors are fp32 unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from .fitted import Fitted as Fitted
from .method import Method
from .values import Blocks, Rows, Shape, Span, Step
from .values.field import Field as Field
from .values.flow import Flow
from .values.seen import Frame as Frame
from .values.seen import Kept as Kept
from .values.seen import Reach as Reach
from .values.seen import Seen as Seen
from .view import Draws as Draws  # methods take what their verbs see from here, too
from .view import Request as Request
from .view import RequestMemory as RequestMemory
from .view import Samples as Samples
from .view import Store as Store
from .view import View as View

if TYPE_CHECKING:
    from .values.packed import Packed


class Role:
    """A seat. `many`: whether several methods may sit on it, in the order of the recipe."""

    many: ClassVar[bool] = False


class Prompt(Role):
    many = True

    def rewrite(self, messages: list[dict[str, str]], count: Callable[[str], int]) -> list[dict[str, str]]:
        """A shorter prompt. `count` says how many tokens a text has."""
        raise NotImplementedError


class Reuse(Role):
    def lookup(self, ids: tuple[int, ...]) -> object | None:
        """The stored memory of the longest known prefix of ids, or None."""
        raise NotImplementedError

    def store(self, ids: tuple[int, ...], memory: object) -> None:
        """Remember the memory of ids."""
        raise NotImplementedError


class Position(Role):
    """Needs(keys="bare"): keys are stored without rotation and rotated on read, once for each frame."""

    def frames(self) -> tuple[Frame, ...]:
        """Disjoint frames that cover every distance."""
        raise NotImplementedError

    def reach(self, context: int) -> int:
        """The longest sequence that a model with this context can read."""
        raise NotImplementedError


class Ingest(Role):
    def flow(self, request: Request) -> Flow:
        """How the prompt is prefilled: yields Asks, ends with the reply to the last one."""
        raise NotImplementedError


class Pattern(Role):
    def blocks(self, q: Tensor, view: View) -> Blocks | None:
        """Which key blocks one request's prefill chunk q [N, H, D] reads; None: all (dense). Key blocks count the layer's
        tokens in stored order."""
        raise NotImplementedError


class Prune(Role):
    many = True

    def survivors(self, x: Tensor, view: View) -> Tensor | None:
        """Ascending indices into one request's chunk x [N, M] that go on to the later layers; None: all."""
        raise NotImplementedError


class Skip(Role):
    def skip(self, layer: int, x: Tensor, step: Step) -> bool:
        """Whether this layer is left out of the step (its keys and values are still written)."""
        raise NotImplementedError


class Admit(Role):
    many = True

    def admit(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Tensor:
        """Which tokens may settle: bool [R, T] for k, v [R, T, D] and pos int64 [R, T] of one request."""
        raise NotImplementedError

    def admits(self, tokens: int) -> int:
        """How many of so many old tokens settle at most; what admission control counts on."""
        return tokens


class Evict(Role):
    many = True
    merges: ClassVar[bool] = False
    """Whether it returns merged entries with log-weights."""
    together: ClassVar[bool] = False
    """Whether it chooses among the tokens of all its layers at once. These then settle after the last of them: `weigh` is called for every
    layer, then `keep` for every layer."""

    def due(self, step: Step) -> bool:
        """Whether eviction runs now: after the prompt's last chunk, after every chunk, or also while decoding."""
        return step.phase == "prefill" and step.final[0]

    def decodes(self) -> bool:
        """Whether it looks at queries while decoding, too; if not, these are forgotten once the prompt has settled."""
        return True

    def watches(self, step: Step) -> bool:
        """Whether the attention of this step is to be observed, for one that needs `mass` or `drawn`."""
        return True

    def period(self) -> int | None:
        """The most tokens between two runs while decoding; None where it does not run then."""
        return None

    def peak(self, tokens: int, chunk: int) -> int:
        """The most raw tokens a row holds before eviction runs, for a prompt of so many tokens read in chunks."""
        return tokens

    def bound(self, tokens: int) -> int:
        """The most tokens a row holds after it has run, of so many."""
        return tokens

    def weigh(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> None:
        """See the candidates of a layer as `keep` will, and remember in the view's note what the choice among all layers takes."""

    def keep(self, k: Tensor, v: Tensor, pos: Tensor, view: View) -> Kept:
        """What stays of one request's candidates k, v [R, T, D]; pos int64 [R, T] is -1 where a shorter row is padded."""
        raise NotImplementedError


class Encode(Role):
    unit: ClassVar[int] = 0
    """Of how many tokens, or a multiple, a piece of a page may be for it to be read alone; 0: pages are read whole."""
    joins: ClassVar[bool] = False
    """Whether all KV heads lie in the same pages; the codec then sees them as one wide head too, head after head in each layer's D."""
    prompts: ClassVar[bool] = False
    """Whether it waits until the prompt has been read, and leaves what comes later raw."""
    packs: ClassVar[bool] = False
    """Whether its pages are worth an entropy coder in a file."""

    def across(self) -> int:
        """How many adjacent layers, fewer where they run out, share pages. Above 1 they settle together, once the last of them has the
        tokens, and the codec sees them as one wide head: layer after layer in the dimension D."""
        return 1

    def fields(self, shape: Shape, page: int, layers: int) -> dict[str, Field]:
        """What is stored for a page of one KV head, or of all where it `joins` them, of so many layers."""
        raise NotImplementedError

    def learns(self, shape: Shape, layers: int) -> dict[str, Field]:
        """What is learnt of the tokens of each row that settle first, and kept on the device as long as the memory: its verbs find it
        as `store.learnt(name, pages)`; `store.booked(pages)` says which of them are of the same row, and their order in it."""
        return {}

    def learn(self, k: list[Tensor], v: list[Tensor], span: Span) -> dict[str, Tensor]:
        """From each row's tokens k, v [n, D * layers] (rows may differ in length), what `learns` names: [R, ...]. A row is a KV head, or
        all of them where the codec `joins` them."""
        raise NotImplementedError

    def write(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor, v: Tensor, span: Span) -> None:
        """Store whole pages: k [S, D * layers, W] and v [S, W, D * layers] of which the first fill[s] tokens count, at pages int64 [S]."""
        raise NotImplementedError

    def read(self, store: Store, pages: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Pages int64 [S] of the span's one layer decoded: k [S, D, W], v [S, W, D]."""
        raise NotImplementedError

    def plain(self, store: Store) -> tuple[Tensor, Tensor] | None:
        """Keys [pages, D, W] and values [pages, W, D] where they are stored as floats, so that single tokens and components can be read of
        them; None where they are coded and pages have to be decoded first."""
        return None

    def take(self, store: Store, slots: Tensor, span: Span) -> tuple[Tensor, Tensor] | None:
        """Single tokens decoded, k and v [S, D] of the pool slots int64 [S] (page * W + offset); None to have their pages read."""
        return None

    def attend(self, q: Tensor, store: Store, rows: Rows, reach: Reach, span: Span, shape: Shape) -> tuple[Tensor, Tensor] | None:
        """Fused attention over the codes: (out [N, H', D], lse [N, H']), or None to have the pages read and attended raw."""
        return None


class Place(Role):
    home: ClassVar[str] = "device"
    """The tier where settled pages live: device, host or disk. What is resident stays on the device."""
    attends: ClassVar[bool] = False
    """Whether attention over its pages is computed where they live, and only its result brought to the device."""

    def folder(self) -> str:
        """The directory where its pages lie on the disk; "" is the system's temporary one."""
        return ""

    def keeps(self) -> int:
        """Tokens of each KV head of a layer whose copies stay on the device once a decoding step has read them; those that were not read
        for the longest time go first."""
        return 0

    def shelves(self) -> int:
        """The same on the host, where pages live on the disk."""
        return 0

    def parts(self, heads: int, view: View) -> Iterator[tuple[int, int]]:
        """Ranges of KV heads that are attended one after another; each is fetched to the device, attended, merged."""
        raise NotImplementedError

    def widest(self, heads: int) -> int:
        """How many of so many KV heads are fetched at once at most."""
        return heads


class Select(Role):
    steady: ClassVar[bool] = False
    """Whether `select` calls the same kernels for each token while the rows stay what they are, and Python neither looks at tensors nor
    remembers anything: such steps are played again (engine/replay.py)."""

    def piece(self, page: int) -> int:
        """How many tokens of a page are read together: all of them, or so many that a page is cut into equal pieces."""
        return page

    def fields(self, shape: Shape, page: int) -> dict[str, Field]:
        """The summary that is kept of every settled page, on the device wherever the page lies."""
        return {}

    def summarise(self, store: Store, pages: Tensor, fill: Tensor, k: Tensor) -> None:
        """Write the summary of pages int64 [S] whose keys are k [S, D, W], the first fill[s] tokens of each."""

    def index(self, old: dict[str, Tensor], view: View) -> dict[str, Tensor]:
        """What is known of one request's settled tokens where pages are the wrong unit: tensors whose first dimension is the KV head.
        Called after tokens have settled and when the prompt has been read; `old` is what is known, {} after all settled tokens were
        written anew, and is returned where it still will do. Forks share it and files hold it, so nothing in it is changed in place."""
        return old

    def index_bytes(self, shape: Shape, tokens: int) -> int:
        """The most bytes that a layer's index takes for rows of so many tokens."""
        return 0

    def select(self, q: Tensor, rows: Rows, view: View) -> Seen:
        """What the queries q [N, H, D] of this decode step read, at most all of rows."""
        raise NotImplementedError


class Weights(Role):
    def pack(self, name: str, w: Tensor) -> Packed | None:
        """The packed form of a float matrix, or None to leave it to the loader."""
        raise NotImplementedError


class Head(Role):
    def sample(self, h: Tensor, head: Packed, temperature: Tensor, seed: Tensor, offset: Tensor, cap: float) -> tuple[Tensor, Tensor]:
        """Draw tokens int64 [B] and their log-probabilities [B] from the final states h [B, M]."""
        raise NotImplementedError


class Decode(Role):
    def flow(self, request: Request, reply: Tensor) -> Flow:
        """How tokens are drawn after the prompt, from its last reply on: yields Asks and Emits."""
        raise NotImplementedError

    def beside(self) -> tuple[Method, ...]:
        """The methods of a second memory that the flow keeps, if it does."""
        return ()


class Review(Role):
    many = True

    def review(self, request: Request) -> Flow:
        """Extra passes between the prompt and the first token."""
        raise NotImplementedError


class Stop(Role):
    many = True

    def done(self, tokens: tuple[int, ...], text: str) -> bool:
        """Whether the answer is complete."""
        raise NotImplementedError


SEATS: tuple[type[Role], ...] = (
    Prompt, Reuse, Position, Ingest, Pattern, Prune, Skip, Admit, Evict, Encode, Place, Select, Weights, Head, Decode, Review, Stop,
)  # fmt: skip
