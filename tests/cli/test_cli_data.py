"""`megatron-longctx data` writes text as Megatron's indexed dataset, byte for byte."""

import base64
import gzip
import json
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_longctx.cli import cli

Run = Callable[..., str]
TWO_FRAMES = "KLUv/SAQgQAAeyJ0ZXh0IjogIm9uZSJ9Cii1L/0gEIEAAHsidGV4dCI6ICJ0d28ifQo="  # a line of JSONL each, in zstd
EOD = 256  # of the byte-level tokenizer


@pytest.fixture
def data(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Run:
    """Runs the verb and returns its log, or its standard error if it must fail."""

    def run(source: Path | str, out: Path, *more: str, code: int = 0) -> str:
        caplog.clear()
        assert cli.main(["data", "--source", str(source), "--out", str(out), *more]) == code
        captured = capsys.readouterr()
        assert (captured.err == "") == (code == 0)
        return captured.err if code else "\n".join(caplog.messages)

    return run


def documents(prefix: Path) -> list[list[bytes]]:
    """Return the texts of every document, decoded."""
    dataset = IndexedDataset(str(prefix))
    found = []
    for index in range(len(dataset)):
        ids = numpy.asarray(dataset[index]).tolist()
        assert ids[-1] == EOD, "a document ends with the end-of-document token"
        texts: list[bytes] = [b""]
        for token in ids[:-1]:
            if token == EOD:
                texts.append(b"")
            else:
                texts[-1] += bytes([token])
        found.append(texts)
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of packages and files, some of which are left out."""
    files = {
        "pkg/b.py": "second",
        "pkg/a.py": "first",
        "pkg/inner/c.py": "third: naïve ☃",
        "alone.py": "alone",
        "pkg/empty.py": "",
        "void/empty.py": "",
        "pkg/notes.txt": "notes",
        "pkg/tests/t.py": "left out",
        "site-packages/x.py": "left out",
        "__pycache__/y.py": "left out",
    }
    for name, text in files.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "source"


def test_joined_folders_have_one_document_per_package(source: Path, tmp_path: Path, data: Run) -> None:
    prefix = tmp_path / "deep/out/corpus"
    out = data(source, prefix, "--join", "--glob", "**/*.py")
    expected = [[b"alone"], [b"first", b"second", "third: naïve ☃".encode()]]
    assert documents(prefix) == expected
    tokens = sum(len(text) + 1 for texts in expected for text in texts)
    assert out == f"{prefix}: 2 documents, {tokens} tokens ({source}), the byte-level tokenizer"
    note = json.loads(prefix.with_suffix(".json").read_text())
    assert len(note.pop("tokenizer_sha256")) == 64
    assert note == {"tokenizer": "byte-level", "vocab_size": 512, "documents": 2, "tokens": tokens}
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["corpus.bin", "corpus.idx", "corpus.json"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["b", "c", "a", "d", "e"]),  # in the order of their paths
        (["--glob", "*/*.html"], ["f"]),
        (["--join"], ["b", "ca", "e"]),  # without its tests
    ],
)
def test_the_files_of_a_folder(words: list[str], expected: list[str], tmp_path: Path, data: Run) -> None:
    names = {"z.md": "e", "y/n.txt": "a", "y/m/n.rst": "c", "y/tests/n.py": "d", "a.tex": "b", "y/n.html": "f"}
    for name, text in {**names, ".git/n.txt": "no", "y/.n.md": "no", "y/empty.txt": ""}.items():
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    data(tmp_path / "text", tmp_path / "corpus", *words)
    assert ["".join(map(bytes.decode, texts)) for texts in documents(tmp_path / "corpus")] == expected


def test_a_text_file_is_a_document(tmp_path: Path, data: Run) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    data(tmp_path / "a.txt", tmp_path / "corpus")
    assert documents(tmp_path / "corpus") == [[b"one\n\ntwo\n"]]


def test_bytes_that_are_not_utf8_are_replaced(tmp_path: Path, data: Run) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.py").write_bytes(b"caf\xe9")
    data(tmp_path / "text", tmp_path / "corpus")
    assert documents(tmp_path / "corpus") == [["caf\ufffd".encode()]]


def test_jsonl_has_one_document_per_line(tmp_path: Path, data: Run) -> None:
    path = tmp_path / "texts.jsonl"
    lines = [{"text": "one"}, {"id": 7, "text": "two\nlines"}, {"text": "ünï"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ": 3 documents, 20 tokens (" in data(path, tmp_path / "corpus")
    assert documents(tmp_path / "corpus") == [[b"one"], [b"two\nlines"], ["ünï".encode()]]


def test_a_folder_of_jsonl_has_one_document_per_line(tmp_path: Path, data: Run) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n'))
    (folder / "c.txt.gz").write_bytes(gzip.compress(b"four\n{}\n"))
    (folder / "d.jsonl").write_text("")
    expected = [[b"one"], [b"two"], [b"three"], [b"four\n{}\n"]]
    for words in ([], ["--glob", "*"]):
        data(folder, tmp_path / "corpus", *words)
        assert documents(tmp_path / "corpus") == expected
    data(folder, tmp_path / "corpus", "--glob", "*.jsonl")
    assert documents(tmp_path / "corpus") == expected[:2]
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n' * 100)[:-20])
    assert f"{folder}/b.jsonl.gz: damaged, or not a file in .gz (" in data(folder, tmp_path / "corpus", code=2)


def test_zstandard_is_read_or_its_package_named(tmp_path: Path, data: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path, corpus = tmp_path / "a.jsonl.zst", tmp_path / "corpus"
    path.write_bytes(base64.b64decode(TWO_FRAMES))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pyarrow", None)
        message = f"{path}: expected the package pyarrow. Run pip install 'megatron-longctx[data]'"
        assert message in data(path, corpus, code=2)
    pytest.importorskip("pyarrow")
    data(path, corpus)
    assert documents(corpus) == [[b"one"], [b"two"]]
    path.write_bytes(path.read_bytes()[:-5])
    assert f"{path}: damaged, or not a file in .zst (" in data(path, corpus, code=2)


def test_links_do_not_lead_out_of_the_folder(tmp_path: Path, data: Run) -> None:
    for name in ("text/a.txt", "other/secret.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    (tmp_path / "text/b.txt").symlink_to("a.txt")
    data(tmp_path / "text", tmp_path / "corpus")
    assert len(documents(tmp_path / "corpus")) == 2
    for link, target, words in (
        ("c.txt", tmp_path / "other/secret.txt", []),
        ("d", tmp_path / "other", ["--glob", "*/*.txt"]),
    ):
        (tmp_path / "text" / link).symlink_to(target)
        message = data(tmp_path / "text", tmp_path / "corpus", *words, code=2)
        assert f"is a link to {tmp_path}/other/secret.txt. Name the folder that it leads to" in message
        (tmp_path / "text" / link).unlink()


def test_the_standard_library_is_a_source(
    source: Path, tmp_path: Path, data: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sysconfig.get_paths()
    assert (Path(real["stdlib"]) / "json/decoder.py").is_file(), "the source of the demo's text"
    monkeypatch.setattr(sysconfig, "get_paths", lambda: real | {"stdlib": str(source)})
    assert "(stdlib)" in data("stdlib", tmp_path / "corpus")
    assert [len(texts) for texts in documents(tmp_path / "corpus")] == [1, 3]


BAD_LINES = (
    *(b"", b"not json", b'["text"]', b'"text"', b'{"text": 3}', b'{"text": null}', b'{"text": ["a"]}'),
    *(b'{"text": "caf\xe9"}', b'{"text": "\\ud800"}', b'{"text": ' + b"[" * 100_000, b'{"a":' * 100_000),
)


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20].decode(errors="replace"))
def test_a_bad_line_is_named_and_nothing_is_written(line: bytes, tmp_path: Path, data: Run) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')
    message = data(path, tmp_path / "out/corpus", code=2)
    assert message == f'megatron-longctx data: {path}:2: expected {{"text": "…"}} in UTF-8. Fix or remove the line.\n'
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_a_failed_source_keeps_the_earlier_corpus(tmp_path: Path, data: Run) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "kept"}\n')
    data(path, tmp_path / "corpus")
    path.write_text('{"text": "new"}\nbroken\n')
    data(path, tmp_path / "corpus", code=2)
    assert documents(tmp_path / "corpus") == [[b"kept"]]


ENDINGS = ".jsonl, .md, .py, .rst, .tex, .txt, these with .gz or .zst, or .parquet"
NAMED = f"`stdlib`, a folder, a pattern, or a file that ends in {ENDINGS}. Check the path, or"


CHATS = {"a.jsonl": '{"prompt": "why?", "completion": "so"}\n'}


@pytest.mark.parametrize(
    ("files", "source", "words", "expected"),
    [
        ({}, "gone", [], f"--source=AT/gone: expected {NAMED} name a folder and its files by --glob."),
        ({"a.jsonl/b": ""}, "gone.jsonl", [], f"--source=AT/gone.jsonl: expected {NAMED}"),
        ({"a.pdf": "%PDF"}, "a.pdf", [], f"--source=AT/a.pdf: expected {NAMED}"),
        ({"a.txt": ""}, "a.txt", [], "--source=AT/a.txt: expected text; the file is empty. Check what wrote it."),
        ({"a.jsonl": ""}, "a.jsonl", [], "--source=AT/a.jsonl: expected text; the file is empty."),
        ({"x/y/.gitkeep": ""}, "x", [], "--source=AT/x: expected files in the folder; it has none. Check the path."),
        ({"x/a.pdf": "p", "x/y/b.pdf": "p", "x/c": "c"}, "x", [],
         f"--source=AT/x: expected files that end in {ENDINGS}; its 3 files have .pdf, no ending. "
         "Choose other text files by --glob, for example '**/*.html'."),
        ({"x/a.md": "", "x/b.md": ""}, "x", [], "--source=AT/x: expected text; all 2 files are empty."),
        ({"x/a.md": "a"}, "x", ["--glob", "*.txt"],
         "--glob=*.txt: expected a pattern that files in AT/x match; none does. For example '**/*.txt'."),
        ({"x/tests/a.md": "a"}, "x", ["--join"], "--source=AT/x: expected text outside of tests; all 1 files"),
        ({"a.jsonl": '{"text": "a"}\n{"id": 1, "content": "b"}\n'}, "a.jsonl", [],
         "AT/a.jsonl:2: expected `text` (or `messages`, or `prompt` and `completion`, from the first line on); it "
         "has id, content. Rename the key, or name it by --text-key."),
        ({"a.jsonl": "{}\n"}, "a.jsonl", [], "AT/a.jsonl:1: expected `text` (or `messages`, or `prompt` and"),
        ({"a.jsonl": '{"prompt": "a"}\n'}, "a.jsonl", ["--chat-template", "AT/a.jsonl"], "AT/a.jsonl:1: expected {"),
        ({"a.jsonl": '{"text": "one"}\n{"text": ""}\n'}, "a.jsonl", [],
         "AT/a.jsonl:2: expected a text that is not empty. Fix or remove the line."),
        (CHATS, "a.jsonl", [],
         "--chat-template=None: expected a file: the lines are conversations, and this tokenizer has no chat"),
        (CHATS, "a.jsonl", ["--chat-template", "gone"],
         "--chat-template=gone: expected a file with a Jinja template"),
        ({"a.md": "a"}, "a.md", ["--chat-template", "template"],
         "--chat-template=template: expected conversations to lay out; the first line of AT/a.md is none"),
        ({"x/a.json": '{"text": "a"}\n{"text": "b"}\n'}, "x", ["--glob", "*.json"],
         "AT/x/a.json: expected text, but its first line is a document in JSON. Let its name end in .jsonl"),
        ({"x/a.md": "a", "x/b.jsonl": '{"text": "a"}\n'}, "x", ["--join"],
         "--source=AT/x: expected one folder of text with --join; lines of JSONL are documents of their own"),
        ({"a.jsonl.gz": "text"}, "a.jsonl.gz", [], "AT/a.jsonl.gz: damaged, or not a file in .gz ("),
        ({"a.md": "a"}, "a.md", ["--tokenizer", "huggingface"],
         "--tokenizer-path None: expected the files of a huggingface tokenizer"),
        ({"a.md": "a"}, "a.md", ["--tokenizer-path", "gone"],
         "--tokenizer-path=gone: expected none with the byte-level tokenizer"),
        ({"a.md": "a"}, "a.md", ["--glob", "*.md"], "--glob=*.md: expected a folder in AT/a.md to choose files of."),
        ({"a.md": "a"}, "a.md", ["--tokenizer", "sentencepiece"],
         "--tokenizer-path None: expected the files of a sentencepiece tokenizer"),
        ({"a.md": "a"}, "a.md", ["--tokenizer", "tiktoken", "--tokenizer-path", "gone"],
         "--tokenizer-path gone: expected the files of a tiktoken tokenizer"),
    ],
)  # fmt: skip
def test_sources_that_cannot_be_read_are_refused(
    files: dict[str, str], source: str, words: list[str], expected: str, tmp_path: Path, data: Run
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    words = [word.replace("AT/", f"{tmp_path}/") for word in words]
    message = data(tmp_path / source, tmp_path / "out/corpus", *words, code=2)
    assert message.startswith(f"megatron-longctx data: {expected.replace('AT/', f'{tmp_path}/')}")
    assert message.count("\n") == 1 and not list(tmp_path.glob("out/*"))


def test_an_empty_source_is_not_the_current_folder(tmp_path: Path, data: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.py").write_text("text")
    monkeypatch.chdir(tmp_path)
    assert "--source=: expected `stdlib`, a folder" in data("", tmp_path / "out/corpus", code=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("glob", ["/etc/*", "../*", "**/../../*", "", "a**b", "/"])
def test_a_pattern_that_is_invalid_or_leaves_the_folder(glob: str, source: Path, tmp_path: Path, data: Run) -> None:
    (tmp_path / "outside.py").write_text("outside")
    message = data(source, tmp_path / "out/corpus", "--glob", glob, code=2)
    assert message.startswith(f"megatron-longctx data: --glob={glob}: expected a pattern of paths inside {source} (")
    assert message.count("\n") == 1 and not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("out", ["", ".", "..", "a/..", "a\nb", "folder"])
def test_an_output_without_a_name(out: str, source: Path, data: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source)
    (source / "folder").mkdir()
    before = sorted(source.rglob("*"))
    message = data(source, out, code=2)
    assert "expected a path that ends in a name of one line" in message and message.count("\n") == 1
    assert sorted(source.rglob("*")) == before


def test_chats_are_formatted_and_only_replies_are_trained(tmp_path: Path, data: Run) -> None:
    (tmp_path / "template").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    path = tmp_path / "chats.jsonl"
    path.write_text('{"prompt": "why?", "completion": "so"}\n{"prompt": "and?", "completion": "no"}\n')
    (tmp_path / "folder").mkdir()
    for number, line in enumerate(path.read_text().splitlines()):
        (tmp_path / f"folder/{number}.jsonl").write_text(line)
    of_folder = data(tmp_path / "folder", tmp_path / "chats", "--chat-template", str(tmp_path / "template"))
    assert ": 2 documents, 20 tokens, 8 of them answers (" in of_folder
    message = data(path, tmp_path / "chats", "--chat-template", str(tmp_path / "template"))
    assert ": 2 documents, 20 tokens, 8 of them answers (" in message
    tokens, mask = IndexedDataset(str(tmp_path / "chats")), IndexedDataset(str(tmp_path / "chats.mask"))
    assert [bytes(tokens[i].tolist()) for i in range(2)] == [b"[why?][so]", b"[and?][no]"]
    assert [mask[i].tolist() for i in range(2)] == [[0] * 6 + [1] * 4] * 2
    path.write_text('{"prompt": "why?", "completion": "so"}\n{"prompt": "why?"}\n')
    message = data(path, tmp_path / "chats", "--chat-template", str(tmp_path / "template"), code=2)
    assert message.startswith(f"megatron-longctx data: {path}:2: expected ") and message.count("\n") == 1
    assert len(IndexedDataset(str(tmp_path / "chats"))) == 2, "the earlier corpus is kept"
    assert not list(tmp_path.glob("*.partial*"))
