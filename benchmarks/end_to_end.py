"""Speed of whole models inside PyTorch, where no call of attention repeats.

    python -m tileattn bench end_to_end                  small models on the CPU: a minute
    python -m tileattn bench end_to_end --gpu            on a GPU: about three minutes
    python -m tileattn bench end_to_end --gpu --only training --peers flash,cudnn
    python -m tileattn bench end_to_end --gpu --only training --dtype f32 --tokens 1024,4096

training: a step of a GPT-2 with AdamW, batches padded to their longest sequence, with dropout and
    without dropout in attention, which FlashAttention-3 and 4 lack; --quick in float32 has only
    the row without. --tokens sets the length of the longest sequences; longer ones make smaller
    batches. "rest_ms" is the time of a step whose attention returns v unchanged.
    "attention_over_peers" divides times of steps from which the rest is subtracted
generation: tokens of a Llama whose cache grows, in plain PyTorch and, if it is installed, in
    transformers with its dynamic cache

The file is end_to_end_cpu.json or end_to_end_gpu.json, or NAME.json. A dtype that is not the
default of the device is part of the name: end_to_end_gpu_f32.json.

Libraries take turns with models of the same weights. Each round has lengths that no earlier round
had. A time is the median of the rounds. "Repeated" is tileattn once more with the same lengths.
PyTorch's float32 matmuls are in "ieee", not in TF32.
"""

import argparse
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks import peers, report
from benchmarks.clock import Queue, Times, deal
from benchmarks.configurations import Call
from benchmarks.cpu import rounded
from benchmarks.device import Gpu
from benchmarks.libraries import DropIn, Torch
from benchmarks.models import Attention, Gpt, Llama, Rest, Sizes
from benchmarks.report import Row, one_line
from tileattn.backends import threads

DROPOUT = 0.1
DROPOUTS = (DROPOUT, 0.0)  # in attention
GPT = {
    "cuda": Sizes(12, 768, 12, 12, 3072, 50304, 1024),
    "cpu": Sizes(4, 256, 4, 4, 512, 1000, 160),
}
BATCH = {"cuda": 8, "cpu": 2}
LENGTHS = range(64, 65_537)  # positions: every round has new ones; 65,536 have 13 GB of logits
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
DTYPE = {"cuda": "bf16", "cpu": "f32"}
LLAMA = {
    "cuda": Sizes(16, 2048, 32, 8, 8192, 32000, 4096),
    "cpu": Sizes(16, 256, 4, 2, 512, 1000, 4096),
}
AGREEMENT = {torch.bfloat16: 0.1, torch.float32: 1e-4}  # relative, of logits or gradients
SHARED = ("tileattn", "SDPA")  # with transformers
REST = Rest("rest")
PEERS = ("sdpa", "cudnn", "flash", "efficient", "fa2", "fa3", "fa4")


@dataclass(frozen=True)
class Bench:
    """What takes part, and how long."""

    device: str
    dtype: torch.dtype
    libraries: list[Torch]
    queue: Queue
    rounds: int
    steps: int  # of training in a round
    tokens: int  # to generate
    gpt: Sizes
    llama: Sizes
    batch: int  # sequences of a batch in training
    lengths: Sequence[int]  # positions in training
    dropouts: Sequence[float]  # in attention

    def of_length(self, tokens: int) -> "Bench":
        """Return a bench with other positions in training, but as many tokens in a batch."""
        batch = max(1, self.batch * self.gpt.tokens // tokens)
        return replace(self, gpt=self.gpt._replace(tokens=tokens), batch=batch)


@dataclass
class Turns:
    """Times of participants, and why others have none."""

    new: dict[str, Times] = field(default_factory=dict)
    again: dict[str, Times] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def row(self, unit: float = 1e3) -> Row:
        """Return milliseconds, divided by the calls that one measured call consists of."""
        ms = {name: times.figures()["us"] / unit for name, times in self.new.items()}
        again = {name: times.figures()["us"] / unit for name, times in self.again.items()}
        rest = ms.pop(REST.name, None)
        row = {"ms": ms, "repeated_ms": again, "over_peers": over_peers(ms, again)}
        if rest is not None:
            row |= {"rest_ms": rest, "attention_over_peers": over_peers(ms, again, rest)}
        return row | {"failed": self.failed}


def over_peers(
    ms: Mapping[str, float], ours: Collection[str], rest: float = 0.0
) -> dict[str, float]:
    """Return the speedups of ours over the fastest other library, for times less the rest."""
    fastest = min((x for name, x in ms.items() if name not in ours), default=0.0) - rest
    own = {name: ms[name] - rest for name in ours}
    return {name: fastest / x for name, x in own.items() if min(fastest, x) > 0}


# --- training -------------------------------------------------------------------------------------


def training(bench: Bench) -> Iterator[Row]:
    """Time a step of a GPT-2: forward and backward pass, and AdamW."""
    for tokens in bench.lengths:
        for dropout in bench.dropouts:
            yield trained(dropout, bench.of_length(tokens))


def trained(dropout: float, bench: Bench) -> Row:
    """Time the steps of all participants in turns; record failures."""
    every = [*bench.libraries, REST]
    checked = [] if dropout else bench.libraries
    least, count = bench.gpt.tokens // 4, 1 + bench.rounds * len(every)
    warm, *hands = deal(bench.gpt.tokens - least, count, bench.steps)
    turns, models, expected = Turns(), {}, None
    for library in every:
        try:
            model = gpt(library, dropout, bench)
            with library.context():
                found = gradient(model, batch(least, bench))
                expected = found if expected is None else expected
                if library in checked:
                    check("gradients", found, expected, bench)
                step = trainer(model)
                for n in warm[:3]:
                    step(batch(least + n, bench))
            models[library.name] = step
        # A library that does not fit the others installed may fail with anything.
        except Exception as error:
            turns.failed[library.name] = one_line(error)
    dealt = iter(hands)
    for turn in range(bench.rounds):
        for library in every[:: 1 if turn % 2 else -1]:
            hand = next(dealt)
            if library.name in models:
                calls = [partial(models[library.name], batch(least + n, bench)) for n in hand]
                taken(calls, library, turns, bench)
    sizes = f"{bench.gpt.layers} layers of {bench.gpt.width}, {bench.gpt.heads} heads, "
    sizes += f"batches of {bench.batch}, {least} to {bench.gpt.tokens} tokens"
    row = {"section": "training", "sizes": sizes, "tokens": bench.gpt.tokens, "dropout": dropout}
    return row | {"dtype": str(bench.dtype)[6:]} | turns.row()


def gpt(library: Torch, dropout: float, bench: Bench) -> Any:
    """Return a model; all models begin with the same weights."""
    torch.manual_seed(0)
    options = {"dropout_p": dropout} if dropout else {}
    model = Gpt(bench.gpt, Attention(library, bench.gpt, **options), DROPOUT)
    return model.to(bench.device, bench.dtype)


def gradient(model: Any, given: Any) -> Any:
    """Return the gradient of the first layer's queries, keys and values."""
    (found,) = torch.autograd.grad(model.eval()(*given), [model.blocks[0].rows.weight])
    return found


def check(what: str, found: Any, expected: Any, bench: Bench) -> None:
    """Raise an error if two results differ by more than rounding."""
    distance = float((found - expected).float().norm() / expected.float().norm())
    if not distance <= AGREEMENT[bench.dtype]:
        raise RuntimeError(f"the {what} differ by {distance:.1e}")


def trainer(model: Any) -> Callable[[Any], None]:
    """Return a function that trains the model on a batch."""
    optimiser = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)

    def step(given: Any) -> None:
        model(*given).backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def batch(N: int, bench: Bench) -> tuple[Any, Any]:
    """Draw sequences that are padded to N tokens, with targets."""
    made = torch.Generator().manual_seed(N)
    shape = bench.batch, N
    tokens, targets = torch.randint(bench.gpt.vocabulary, (2, *shape), generator=made)
    lengths = torch.randint(N // 2, N + 1, shape[:1], generator=made)
    lengths[0] = N
    targets[torch.arange(N) >= lengths[:, None]] = -100
    return tokens.to(bench.device), targets.to(bench.device)


def taken(calls: Sequence[Call], library: Torch, turns: Turns, bench: Bench) -> None:
    """Time a round of calls and, for tileattn, the same calls once more."""
    into = [turns.new, *([turns.again] if library.ours else [])]
    if library.name in turns.failed:
        return
    try:
        with library.context():
            for times in into:
                times.setdefault(library.name, Times()).add(calls, bench.queue)
    # A library may refuse some of the lengths.
    except Exception as error:
        turns.failed[library.name] = one_line(error)
        for times in into:
            times.pop(library.name, None)


# --- generation -----------------------------------------------------------------------------------


def generation(bench: Bench) -> Iterator[Row]:
    """Time the tokens of a Llama, with prompts of new lengths in each round."""
    sizes = f"{bench.llama.layers} layers of {bench.llama.width}, {bench.llama.heads} heads over "
    sizes += f"{bench.llama.kv_heads}, {bench.tokens} tokens"
    for n, harness in enumerate((plain, in_transformers)):
        row = {"section": "generation", "model": harness.__name__.replace("_", " ")}
        row |= {"sizes": sizes, "dtype": str(bench.dtype)[6:]}
        try:
            yield row | harness(bench, 32 + n * (1 + bench.rounds) * (bench.tokens + 16))
        except ImportError as error:
            print(f"{harness.__name__} does not run: {one_line(error)}")


Generate = Callable[[Any, int], Any]
"""A function of a prompt and of a number of tokens, which returns the new tokens."""


def generated(made: dict[Torch, Generate], first: int, bench: Bench) -> Row:
    """Time the participants; count how many tokens agree."""
    turns = Turns()
    tokens: dict[str, list[list[int]]] = {}
    for turn in range(1 + bench.rounds):
        prompt = prompt_of(first + turn * (bench.tokens + 16), bench)
        every = list(made.items())
        for library, generate in every[:: 1 if turn % 2 else -1]:
            if turn == 0:
                with library.context():
                    tokens[library.name] = generate(prompt, bench.tokens).tolist()
            else:
                taken([partial(generate, prompt, bench.tokens)], library, turns, bench)
    reference, *_ = tokens.values()
    same = {name: agreeing(x, reference) for name, x in tokens.items()}
    return turns.row(1e3 * bench.tokens) | {"equal_tokens": same}


def agreeing(tokens: list[list[int]], reference: list[list[int]]) -> int:
    """Return how many tokens agree before the first that does not."""
    pairs = zip(tokens[0], reference[0], strict=True)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), len(tokens[0]))


def prompt_of(N: int, bench: Bench) -> Any:
    made = torch.Generator().manual_seed(N)
    return torch.randint(bench.llama.vocabulary, (1, N), generator=made).to(bench.device)


def plain(bench: Bench, first: int) -> Row:
    """Generate by a model of plain PyTorch."""
    torch.manual_seed(0)
    model = Llama(bench.llama).to(bench.device, bench.dtype).eval()
    made: dict[Torch, Generate] = {}
    failed, expected = {}, None
    for library in bench.libraries:
        try:
            attention = Attention(library, bench.llama)
            with library.context(), torch.inference_mode():
                caches: list[list[Any]] = [[] for _ in model.blocks]
                model(prompt_of(24, bench), caches, attention)
                found = model(prompt_of(1, bench), caches, attention)
            expected = found if expected is None else expected
            check("logits", found, expected, bench)
        # A library that does not fit the others installed may fail with anything.
        except Exception as error:
            failed[library.name] = one_line(error)
        else:
            made[library] = partial(model.generate, attention=attention)
    row = generated(made, first, bench)
    return row | {"failed": row["failed"] | failed}


def in_transformers(bench: Bench, first: int) -> Row:
    """Generate by transformers' model with a dynamic cache."""
    transformers = importlib.import_module("transformers")
    importlib.import_module("tileattn.torch.transformers").register()
    s = bench.llama
    config = transformers.LlamaConfig(
        vocab_size=s.vocabulary,
        hidden_size=s.width,
        intermediate_size=s.hidden,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        max_position_embeddings=s.tokens,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config).to(bench.device, bench.dtype).eval()

    def generate(name: str, prompt: Any, count: int) -> Any:
        model.set_attn_implementation(name)
        mask = torch.ones_like(prompt)
        limits = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False}
        return model.generate(prompt, attention_mask=mask, **limits)[:, prompt.shape[1] :]

    shared = [x for x in bench.libraries if x.name in SHARED]
    made: dict[Torch, Generate] = {x: partial(generate, x.name.lower()) for x in shared}
    return generated(made, first, bench)


# --- a run ----------------------------------------------------------------------------------------

SECTIONS = {section.__name__: section for section in (training, generation)}


@contextmanager
def ieee_matmuls() -> Iterator[None]:
    """Keep PyTorch from TF32 in float32 matmuls on a GPU; then restore its setting."""
    place = torch.backends.cuda.matmul
    before, place.fp32_precision = place.fp32_precision, "ieee"
    try:
        yield
    finally:
        place.fp32_precision = before


def main(argv: list[str] | None = None) -> None:
    """Run the sections; an interrupted run writes its rows, too."""
    parser = report.parser("end_to_end", __doc__)
    add = parser.add_argument
    names = partial(report.names, tuple(SECTIONS))
    add("--only", type=names, default=list(SECTIONS), help=",".join(SECTIONS))
    add("--gpu", action="store_true", help="time on a GPU")
    add("--quick", action="store_true", help="fewer steps, tokens and rounds")
    add("--dtype", choices=DTYPES, help="(bf16 on a GPU, f32 on the CPU)")
    lengths = partial(report.numbers, LENGTHS)
    add("--tokens", type=lengths, help="positions in training (1024 on a GPU, 160 on the CPU)")
    peers.add_options(parser, PEERS)
    add("--name", help="stem of the file (end_to_end_cpu, end_to_end_gpu, end_to_end_gpu_f32)")
    arguments: argparse.Namespace = report.parsed(parser, argv)
    machine: Callable[[], Row]
    if arguments.gpu:
        device, machine = "cuda", Gpu.required().machine
        queue = Queue.of_gpu(torch.cuda.synchronize)
    else:
        torch.set_num_threads(threads.worker_count())
        device, queue = "cpu", Queue.of()
        machine = lambda: report.host() | {"torch": torch.__version__}  # noqa: E731 - like the other
    found, missing = peers.find(
        name for name in arguments.peers if arguments.gpu or name in peers.ON_CPU
    )
    report.show_missing(missing)
    limits = (2, 5, 32) if arguments.quick else (3, 15, 256)
    every = [DropIn("tileattn"), *(x for x in found.values() if isinstance(x, Torch))]
    dtype = arguments.dtype or DTYPE[device]
    bench = Bench(
        *(device, DTYPES[dtype], every, queue, *limits, GPT[device], LLAMA[device], BATCH[device]),
        lengths=arguments.tokens or [GPT[device].tokens],
        dropouts=(0.0,) if arguments.quick and dtype == "f32" else DROPOUTS,
    )
    made = (row for section in arguments.only for row in SECTIONS[section](bench))
    kind = "" if dtype == DTYPE[device] else f"_{dtype}"
    stem = arguments.name or f"end_to_end_{'gpu' if arguments.gpu else 'cpu'}{kind}"
    path = arguments.to / f"{stem}.json"
    with ieee_matmuls():
        report.written(map(rounded, made), path, machine, arguments.ran, missing=missing)


if __name__ == "__main__":
    main()
