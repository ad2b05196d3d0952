"""Conversations of several sessions with a real model, and the same tokens through a dense forward pass."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_longctx.config import AttentionConfig, Config, ParallelismConfig
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.mcore import checkpoint, groups
from megatron_longctx.mcore.inference import build_engine, inference_config
from megatron_longctx.mcore.model import build_model, fingerprint, padded_vocab_size, transformer_config
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.mcore.tokenizer import build_tokenizer
from tests.shared.training import changed


@dataclass
class Record:
    """One session.

    Attributes:
        tokens: all of them.
        generated: the positions of generated ones.
        logits: keyed by the number of tokens before them.
    """

    tokens: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)


# Per turn: tokens appended to each of three sessions (0: it is left out), and tokens that each then generates.
TURNS = (((23, 1, 2), 3), ((1, 9, 0), 2), ((0, 1, 5), 4), ((7, 0, 1), 1), ((2, 14, 3), 5), ((1, 1, 1), 2))


@contextmanager
def engine_of(config: Config, checkpoints: Path | None = None) -> Iterator[LongContextEngine]:
    """Build the engine of a run in process groups of its sizes; without checkpoints the weights are of a fixed seed."""
    par = config.parallelism
    collection = groups.initialize(tensor=par.tensor_parallel_size, context=par.context_parallel_size, seed=5)
    engine, _ = build_engine(inference_config(config), collection, checkpoints)
    yield engine
    engine.release()
    groups.destroy()


def converse(rank: int, config: Config, checkpoints: Path | None) -> list[Record]:
    """Run all turns with greedy decoding, and record every session's logits after every prefill and every decode."""
    with engine_of(config, checkpoints) as engine:
        source = random.Random(1)
        sessions = [engine.open() for _ in range(3)]
        records = [Record() for _ in sessions]
        for prompts, count in TURNS:
            texts = [[source.randrange(97, 105) for _ in range(size)] for size in prompts]
            active = {session: text for session, text in zip(sessions, texts, strict=True) if text}
            engine.append(active)
            for number in range(count):
                for session, logits in zip(active, engine.next_logits(list(active)), strict=True):
                    records[session.number].logits[len(session.tokens)] = logits.clone()
                # Sequences of a batch end at different times: the first before the others.
                going = list(active)[number % 2 :] or list(active)
                before = {session: len(session.tokens) for session in going}
                engine.continue_all(going, Sampling(max_new_tokens=1))
                for session in going:
                    records[session.number].generated += range(before[session], len(session.tokens))
        for session, record in zip(sessions, records, strict=True):
            record.tokens = list(session.tokens)
            session.close()
        assert engine.cache_manager.used_pages() == 0
    return records


@dataclass(frozen=True)
class Model:
    """A configuration and its weights (None: of the fixed seed)."""

    config: Config
    checkpoints: Path | None = None


@dataclass
class Truth:
    """One rank's conversation, and the dense model's logits for the same texts in fp64 and with the usual kernel."""

    records: list[Record]
    exact: list[Tensor]
    own: list[Tensor]


def converse_in(rank: int, models: Sequence[Model]) -> list[list[Record]]:
    """Run `converse` with several models in one world."""
    return [converse(rank, model.config, model.checkpoints) for model in models]


def truths(rank: int, models: Sequence[Model]) -> list[Truth]:
    """Return the truth for every model, in a world of one rank."""
    found = []
    for model in models:
        records = converse(rank, model.config, model.checkpoints)
        texts = [record.tokens for record in records]
        exact, own = (dense(model.config, model.checkpoints, texts, fp64) for fp64 in (True, False))
        found.append(Truth(records, exact, own))
    return found


def dense(
    config: Config,
    checkpoints: Path | None,
    texts: Sequence[Sequence[int]],
    fp64: bool,
    change: Callable[[GPTModel], None] = lambda _: None,
) -> list[Tensor]:
    """Return logits `[length, vocabulary]` of every text by one forward pass of Megatron's model over all of it.

    Args:
        change: applied to the model before.
    """
    single = replace(config, parallelism=ParallelismConfig())
    if fp64:
        single = replace(single, attention=AttentionConfig(kernel="reference"))
    collection = groups.initialize(seed=5)
    tokenizer = build_tokenizer(single.data.tokenizer)
    vocab_size = padded_vocab_size(single.model, tokenizer.vocab_size)
    sequence = build_sequence(single, collection.cp)
    gpt = build_model(single, transformer_config(single), collection, sequence, vocab_size)
    if checkpoints is not None:
        checkpoint.load(checkpoints, checkpoint.TrainingState([gpt], fingerprint=fingerprint(single, vocab_size)))
    change(gpt)
    gpt = gpt.double().eval() if fp64 else gpt.eval()
    found = []
    for text in texts:
        tokens, pack = torch.tensor([text]), sequence.pack([len(text)])
        with torch.no_grad():
            logits = gpt(tokens, torch.arange(len(text))[None], None, packed_seq_params=pack)
        found.append(logits[0, :, : tokenizer.vocab_size])
    groups.destroy()
    return found


def parallel(config: Config, context: int, tensor: int = 1, **inference: object) -> Config:
    """Return `config` with other parallel sizes and with small pages."""
    sizes = {"parallelism.context_parallel_size": context, "parallelism.tensor_parallel_size": tensor}
    settings = {"page_tokens": 4, "cache_tokens": 600} | inference
    return changed(config, sizes | {f"inference.{name}": value for name, value in settings.items()})
