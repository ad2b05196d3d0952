"""Megabytes of text that `data` makes into tokens in a second of one core, beside the tokenizer's library alone.

The text is of Python's standard library, on which a BPE tokenizer of 16,000 tokens is trained here.
"""

import argparse
import json
import os
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_longctx.training.text import Source, prepare

from .report import Report, check_least, table

_DOCUMENT = 6000  # characters
_VOCABULARY = 16_000
_EOS = "<eos>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=10, help="of text (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="the median is taken (default: %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Measure, and write JSON and a Markdown table."""
    check_least("--megabytes", arguments.megabytes)
    check_least("--repeats", arguments.repeats)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with TemporaryDirectory() as folder:
        root = Path(folder)
        texts = _texts(arguments.megabytes * 10**6)
        size = sum(len(text.encode()) for text in texts) / 1e6
        (root / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        library = _train(texts, root / "bpe")
        source = Source(str(root / "text.jsonl"))
        works: dict[str, Callable[[], Any]] = {
            "byte-level": lambda: prepare(source, root / "bytes", "byte-level", workers=1),
            "huggingface": lambda: prepare(source, root / "bpe_out", "huggingface", str(root / "bpe"), workers=1),
            "library alone": lambda: library.encode_batch_fast(texts, add_special_tokens=False),
        }
        rates = {name: size / _seconds(work, arguments.repeats) for name, work in works.items()}
    what = "megabytes of text per second of one core"
    report = Report(arguments.out, "cpu", what, f"{size:.0f} MB of text in a .jsonl file", what)
    rows = [[name, f"{rate:.1f}"] for name, rate in rates.items()]
    print(report.write({"megabytes": size, "measurements": rates}, table(["tokenizer", "MB/s"], rows)))


def _seconds(work: Callable[[], Any], repeats: int) -> float:
    """Return the median of the seconds of this process's core."""
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        seconds.append(time.process_time() - begin)
    return statistics.median(seconds)


def _texts(most: int) -> list[str]:
    """Return parts of the standard library's sources as documents, of `most` characters together."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts and most > 0:
            text = path.read_text(errors="replace")[:most]
            most -= len(text)
            parts = (text[at : at + _DOCUMENT] for at in range(0, len(text), _DOCUMENT))
            found += [part for part in parts if part.strip()]
    return found


def _train(texts: list[str], folder: Path) -> Any:
    """Train a BPE tokenizer, save it for the library `transformers`, and return it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=[_EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    saved: Any = PreTrainedTokenizerFast
    saved(tokenizer_object=tokenizer, eos_token=_EOS).save_pretrained(folder)
    return tokenizer
