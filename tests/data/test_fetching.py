"""Downloads are complete and verified, or absent. The tests run their own local server."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from uat.cli import main
from uat.data.movielens import fetching
from uat.data.movielens.fetching import Source, fetch


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("ml-1m/ratings.dat", "1::2::3::4\n" * 500)
        file.writestr("ml-1m/movies.dat", "2::A::Drama\n")
    return buffer.getvalue()


CONTENT = archive()


class Server(BaseHTTPRequestHandler):
    """Serves one archive; breaks off after `breaks_after` bytes; knows ranges or does not."""

    breaks_after: int | None = None
    ranges = True
    asked: list[str | None]

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.asked.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        self.wfile.write(CONTENT[start:][: self.breaks_after])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Server]]:
    handler = type("Handler", (Server,), {"asked": []})
    http = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{http.server_port}/ml-1m.zip"
    source = Source(url, hashlib.md5(CONTENT).hexdigest())
    monkeypatch.setattr(fetching, "SOURCES", {"movielens-1m": source})
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield handler
    http.shutdown()
    http.server_close()
    thread.join()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_archive_is_unpacked_and_not_fetched_twice(server: type[Server], tmp_path: Path) -> None:
    folder = fetch("movielens-1m", tmp_path)
    assert names(folder) == ["movies.dat", "ratings.dat"]
    assert names(tmp_path) == ["movielens-1m"]
    assert fetch("movielens-1m", tmp_path) == folder
    assert server.asked == [None]


def test_the_command_line_fetches(server: type[Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "fetch", "movielens-1m", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)[0]["folder"] == str(tmp_path / "movielens-1m")
    with pytest.raises(SystemExit):
        main(["data", "fetch", "movielens-2m", str(tmp_path)])
    assert "unknown data set 'movielens-2m'; did you mean" in capsys.readouterr().err


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_goes_on(server: type[Server], ranges: bool, tmp_path: Path) -> None:
    server.breaks_after, server.ranges = 100, ranges
    with pytest.raises(ValueError, match=r"broke off .* run it again to resume it"):
        fetch("movielens-1m", tmp_path)
    assert names(tmp_path) == ["movielens-1m.zip.part"]
    server.breaks_after = None
    fetch("movielens-1m", tmp_path)
    assert server.asked == [None, "bytes=100-"]
    assert names(tmp_path) == ["movielens-1m"]


def test_a_download_that_was_complete_is_used(server: type[Server], tmp_path: Path) -> None:
    (tmp_path / "movielens-1m.zip.part").write_bytes(CONTENT)
    assert names(fetch("movielens-1m", tmp_path)) == ["movies.dat", "ratings.dat"]


def test_a_download_with_another_sum_is_removed(server: type[Server], tmp_path: Path) -> None:
    (tmp_path / "movielens-1m.zip.part").write_bytes(b"something else")
    with pytest.raises(ValueError, match="the download was removed"):
        fetch("movielens-1m", tmp_path)
    assert names(tmp_path) == []


def test_no_server_gives_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetching, "SOURCES", {"movielens-1m": Source("http://127.0.0.1:9/x.zip", "0")})
    with pytest.raises(ValueError, match=r"broke off .*refused"):
        fetch("movielens-1m", tmp_path)
    with pytest.raises(ValueError, match="unknown data set 'movielens-2m'; known: movielens-1m"):
        fetch("movielens-2m", tmp_path)
