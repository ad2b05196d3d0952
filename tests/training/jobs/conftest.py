"""A small corpus, and the working directory of jobs that use it."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with `tiny.bin`, `tiny.idx` and `tiny.json`."""
    from megatron_longctx.training.text import Source, prepare

    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").mkdir()
    for number in range(4):
        text = "".join(f"line {i} of file {number}: {i * i + number}\n" for i in range(400))
        (folder / "text" / f"{number}.txt").write_text(text)
    prepare(Source(str(folder / "text")), folder / "tiny", "byte-level")
    return folder


@pytest.fixture
def workplace(tmp_path: Path, corpus: Path) -> Path:
    """A fresh working directory with the corpus in `data/`."""
    (tmp_path / "data").symlink_to(corpus)
    return tmp_path


@pytest.fixture
def no_start(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if this process starts ranks."""
    from megatron_longctx.training import launcher

    def fail(*_: object, start_method: str, **__: object) -> None:
        raise AssertionError(f"ranks were started by {start_method}")

    monkeypatch.setattr(launcher, "RankProcesses", fail)
