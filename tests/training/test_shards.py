"""Datasets made in shards: the same bytes with any workers and after any cut, from JSONL, parquet and `datasets`."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.core.errors import JobFailed
from megatron_longctx.mcore.corpus import TokenDataset
from megatron_longctx.testing.distributed import start_context
from megatron_longctx.training import text as shards
from megatron_longctx.training.text import Recipe, Source, prepare
from megatron_longctx.training.text_files import parsed, pieces

LINES = [{"text": f"number {number} {'ab' * (number % 37)}"} for number in range(300)]


@pytest.fixture(scope="module", autouse=True)
def _server() -> None:
    """The server of processes that other tests use as well, with what they import."""
    start_context()
    forkserver.ensure_running()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of about a kilobyte."""
    monkeypatch.setattr(shards, "_MIN_BYTES", 1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of lines and one of text."""
    (tmp_path / "source").mkdir()
    for number in range(3):
        lines = [json.dumps(line) + "\n" for line in LINES[number::3]]
        (tmp_path / f"source/{number}.jsonl").write_text("".join(lines))
    (tmp_path / "source/notes.md").write_text("notes")
    return tmp_path / "source"


def write(source: Path | Source, out: Path, **options: Any) -> dict[str, bytes]:
    """Write a dataset of bytes. Return its files."""
    prepare(source if isinstance(source, Source) else Source(str(source)), out, "byte-level", **options)
    assert not list(out.parent.glob("*.shards"))
    return {path.name: path.read_bytes() for path in sorted(out.parent.glob(f"{out.name}.*"))}


def texts(prefix: Path) -> list[str]:
    dataset = TokenDataset(str(prefix))
    return [bytes(dataset[number][:-1].tolist()).decode() for number in range(len(dataset))]


@pytest.fixture
def whole(folder: Path, tmp_path: Path) -> dict[str, bytes]:
    """The dataset of the folder, written in one shard."""
    files = write(folder, tmp_path / "whole/corpus", workers=1)
    expected = [line["text"] for number in range(3) for line in LINES[number::3]]
    assert texts(tmp_path / "whole/corpus") == [*expected, "notes"]
    return files


@pytest.mark.parametrize("workers", [1, 3])
def test_the_bytes_depend_on_neither_workers_nor_shards(
    workers: int, folder: Path, tmp_path: Path, whole: dict[str, bytes], small: None
) -> None:
    assert write(folder, tmp_path / "cut/corpus", workers=workers) == whole


@pytest.mark.parametrize("most", [1, 7, 100, 10**6])
def test_every_line_is_in_one_piece(most: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for lines in ([b"a", b"", b"ccc", b"d" * 50], [b"x" * 99], [b""]):
        path.write_bytes(b"\n".join(lines))  # the last one does not end
        found = [line.rstrip(b"\n") for piece in pieces(path, most) for line in parsed(piece, lambda row: row)]
        assert found == [line for line in lines if line or len(lines) > 1]


def test_a_cut_job_goes_on_where_it_was(
    folder: Path, tmp_path: Path, whole: dict[str, bytes], small: None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    made, make = [], shards._make

    def cut(place: Path, *rest: Any) -> None:
        if len(made) == 4:
            place.with_suffix(".bin").write_bytes(b"half a shard")
            raise KeyboardInterrupt
        made.append(place.name)
        make(place, *rest)

    out = tmp_path / "cut/corpus"
    monkeypatch.setattr(shards, "_make", cut)
    with pytest.raises(KeyboardInterrupt):
        write(folder, out, workers=1)
    assert "keeps 4 finished shards: the same command goes on from there" in caplog.text
    assert not list(out.parent.glob("corpus.*in")), "no dataset yet"
    (tmp_path / "cut/corpus.shards/000002.bin").write_bytes(b"damaged")
    (folder / "0.jsonl").touch()  # its first shards are made again
    monkeypatch.setattr(shards, "_make", lambda place, *rest: (made.append(place.name), make(place, *rest)))
    monkeypatch.setattr("megatron_longctx.config.progress.EVERY_S", 0.01)
    assert write(folder, out, workers=1) == whole
    assert made == [*made[:4], *sorted({*made[4:]})] and len({*made}) > 12 and made.count("000002") == 2


def test_only_the_shards_of_a_changed_file_are_made_again(
    folder: Path, tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = folder / "2.jsonl"
    lines = bad.read_text().splitlines()
    bad.write_text("\n".join([*lines[:70], "no JSON", *lines[71:]]))
    with pytest.raises(ValueError, match=r"2\.jsonl:71: expected \{\"text\": \"…\"\} in UTF-8"):
        write(folder, tmp_path / "corpus", workers=2)
    kept = {path.name for path in (tmp_path / "corpus.shards").glob("*.json")}
    assert len(kept) > 5
    made: list[str] = []
    make = shards._make
    monkeypatch.setattr(shards, "_make", lambda place, *rest: (made.append(f"{place.name}.json"), make(place, *rest)))
    bad.write_text("\n".join(lines))
    write(folder, tmp_path / "corpus", workers=1)
    assert texts(tmp_path / "corpus")[-2] == LINES[299]["text"]
    assert len(kept - {*made}) > 5, "those of the other files"


def test_a_killed_worker_ends_the_job_and_keeps_the_finished_shards(
    folder: Path, tmp_path: Path, whole: dict[str, bytes], small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = shards.RankProcesses.wait

    def kill(processes: Any, timeout: float) -> bool:
        if list((tmp_path / "cut/corpus.shards").glob("*.json")):
            with contextlib.suppress(ProcessLookupError):  # it was killed by the previous call
                os.kill(processes.pids[0], signal.SIGKILL)
        return wait(processes, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(shards.RankProcesses, "wait", kill)
        patch.setattr(shards, "_POLL_S", 0.001)
        patch.setattr(shards, "_worker", slow_worker)
        with pytest.raises(JobFailed, match="worker 0 was killed by SIGKILL"):
            write(folder, tmp_path / "cut/corpus", workers=2)
    assert write(folder, tmp_path / "cut/corpus", workers=1) == whole


def slow_worker(rank: int, jobs: Any, recipe: Recipe, taken: Any) -> None:
    import time

    from megatron_longctx.training import text as module

    make = module._make
    module._make = lambda *job: (make(*job), time.sleep(0.05))[0]  # type: ignore[func-returns-value]
    module._worker(rank, jobs, recipe, taken)


def test_two_commands_do_not_write_one_dataset(folder: Path, tmp_path: Path, small: None) -> None:
    with (
        shards._folder(tmp_path / "corpus.shards", tmp_path / "corpus"),
        pytest.raises(ValueError, match="expected a dataset that no other command writes"),
    ):
        write(folder, tmp_path / "corpus", workers=1)


def test_several_sources_patterns_and_another_key(tmp_path: Path) -> None:
    for name, text in {"b/x.jsonl": "one", "b/y.jsonl": "two", "a/x.jsonl": "three", "z.jsonl": "four"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"body": text, "prompt": "a chat?"}) + "\n")
    names = [str(tmp_path / name) for name in ("z.jsonl", "b", "*/x.jsonl")]
    with pytest.raises(ValueError, match=r"expected each file once; .*b/x\.jsonl is in two of these"):
        write(Source(names[0], more=tuple(names[1:])), tmp_path / "corpus")
    for more, expected in ((names[1:2], ["four", "one", "two"]), (names[2:], ["four", "three", "one"])):
        write(Source(names[0], more=tuple(more), text_key="body"), tmp_path / "corpus")
        assert texts(tmp_path / "corpus") == expected
    with pytest.raises(ValueError, match=r"expected a pattern that files match; none does"):
        write(Source(f"{tmp_path}/*.parquet"), tmp_path / "corpus")
    with pytest.raises(ValueError, match=r"z\.jsonl:1: expected `title` .* it has body, prompt\. .*--text-key"):
        write(Source(names[0], text_key="title"), tmp_path / "corpus")


def test_links_out_of_a_patterns_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.jsonl").write_text('{"text": "secret"}\n')
    (tmp_path / "in/a.jsonl").symlink_to(tmp_path / "secret.jsonl")
    with pytest.raises(ValueError, match="is a link to"):
        write(Source(f"{tmp_path}/in/*.jsonl"), tmp_path / "corpus")


def test_plain_text_has_no_keys(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("text")
    for name in (f"{tmp_path}/a.md", "stdlib"):
        with pytest.raises(ValueError, match="--text-key=body: expected lines or rows that have keys"):
            write(Source(name, text_key="body"), tmp_path / "corpus")


@pytest.mark.parametrize("workers", [0, -1])
def test_workers_that_cannot_be(workers: int, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--workers={workers}: expected 1 or more"):
        write(folder, tmp_path / "corpus", workers=workers)
    with pytest.raises(ValueError, match="--workers=2: expected 1 for these documents, which are made together"):
        write(Source("stdlib"), tmp_path / "corpus", workers=2)


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Write rows as a table."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def write_table(name: str, rows: list[dict[str, Any]], **options: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
        return path

    yield write_table


def test_the_rows_of_a_table_are_documents(tables: Callable[..., Path], tmp_path: Path, small: None) -> None:
    rows = [{"id": number, "text": line["text"]} for number, line in enumerate(LINES)]
    path = tables("a.parquet", rows, row_group_size=40)
    assert len(list(pieces(path, 1000))) == 8
    write(path, tmp_path / "corpus", workers=2)
    assert texts(tmp_path / "corpus") == [line["text"] for line in LINES]
    rows[200]["text"] = ""
    with pytest.raises(ValueError, match=r"a\.parquet:201: expected a text that is not empty"):
        write(tables("a.parquet", rows, row_group_size=40), tmp_path / "other", workers=1)
    with pytest.raises(ValueError, match=r"a\.parquet:1: expected `body` .* it has id, text\."):
        write(Source(str(path), text_key="body"), tmp_path / "other", workers=1)


def test_conversations_in_a_table(tables: Callable[..., Path], tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
    (tmp_path / "template").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    out = write(tables("talks.parquet", [{"messages": talk}]), tmp_path / "chats", chat_template=f"{tmp_path}/template")
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"messages": talk}) + "\n")
    assert write(lines, tmp_path / "again/chats", chat_template=f"{tmp_path}/template") == out
    assert "chats.mask.bin" in out


def test_a_dataset_of_the_hub(tables: Callable[..., Path], tmp_path: Path) -> None:
    tables("hub/data/train-00001-of-00002.parquet", [{"text": "b"}])
    tables("hub/data/train-00000-of-00002.parquet", [{"text": "a"}])
    (tmp_path / "hub/README.md").write_text("the card")
    write(tmp_path / "hub", tmp_path / "corpus")
    assert texts(tmp_path / "corpus") == ["a", "b"]
    tables("hub/data/validation-00000-of-00001.parquet", [{"text": "c"}])
    with pytest.raises(ValueError, match=r"expected files of one split; their names have train, validation\. .*train"):
        write(tmp_path / "hub", tmp_path / "corpus")
    write(Source(str(tmp_path / "hub"), "**/*train*"), tmp_path / "corpus")
    assert texts(tmp_path / "corpus") == ["a", "b"]
    (tmp_path / "hub/data/validation-00000-of-00001.parquet").unlink()
    (tmp_path / "hub/data/train-2.parquet").symlink_to(tables("other.parquet", [{"text": "secret"}]))
    with pytest.raises(ValueError, match="is a link to"):
        write(tmp_path / "hub", tmp_path / "corpus")


def test_a_dataset_that_the_library_saves(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([*LINES, {"text": "left out"}]).select(range(len(LINES)))
    rows.to_parquet(tmp_path / "saved.parquet")
    write(tmp_path / "saved.parquet", tmp_path / "corpus")
    assert texts(tmp_path / "corpus") == [line["text"] for line in LINES]
    rows.save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"its 3 files have .*\.arrow.* Save the dataset by `to_parquet`\."):
        write(tmp_path / "saved", tmp_path / "other")


def test_a_damaged_table_is_refused(tables: Callable[..., Path], tmp_path: Path) -> None:
    path = tables("a.parquet", LINES, compression="none", use_dictionary=False)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"PAR1 text", b"{}", content.replace(b"number 7 ", b"number \xff ")):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"^{path}: damaged, or not a file in .parquet \(.*\)\. Fetch"):
            write(path, tmp_path / "corpus", workers=1)
    assert not list(tmp_path.glob("corpus*"))


def test_a_table_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    expected = r"a\.parquet: expected the package pyarrow\. Run pip install 'megatron-longctx\[data\]'"
    with pytest.raises(ValueError, match=expected):
        write(tmp_path / "a.parquet", tmp_path / "corpus")
