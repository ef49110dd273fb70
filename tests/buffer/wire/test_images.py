"""Images are read from where prompts say, and only if they are the files that were meant."""

import http.server
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rollq.buffer.errors import ImageError
from rollq.buffer.values.rollouts import ImageRef
from rollq.buffer.wire import images
from rollq.buffer.wire.images import MOST_IMAGE_BYTES, digest_of_image, inline_image, read_file, read_image

DATA = b"\x89PNG any bytes"


def test_a_file_is_read_from_its_path(tmp_path: Path) -> None:
    path = tmp_path / "with space é.png"
    path.write_bytes(DATA)
    assert read_image(ImageRef(path.as_uri(), digest_of_image(DATA))) == DATA


def test_a_file_is_read_from_the_reference_itself() -> None:
    image = inline_image(DATA)
    assert image.sha256 == digest_of_image(DATA)
    assert read_image(image) == DATA


@pytest.mark.parametrize("image", [inline_image(DATA), inline_image(DATA * 100)])
def test_another_file_is_refused(image: ImageRef) -> None:
    with pytest.raises(ImageError, match=r"sha256 is \w{12}\.\.\., the prompt was made with 0{12}\.\.\."):
        read_image(ImageRef(image.url, "0" * 64))


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("file:///does/not/exist.png", "No such file"),
        ("file:///", "it is not a file"),
        ("file:///dev/zero", "it is not a file"),
        ("http://localhost/image.png", "only file:///, https:// and data:;base64, can be read"),
        ("ftp://localhost/image.png", "only file:///"),
        ("/image.png", "only file:///"),
        ("data:;base64,not base64!", "not base64"),
        ("https://127.0.0.1:1/image.png", "refused"),
        ("https://[", "Invalid"),
        ("https://localhost:abc/", "nonnumeric port"),
        ("file:///a%00b", "null"),
    ],
)
def test_what_cannot_be_read_is_named(url: str, problem: str) -> None:
    with pytest.raises(ImageError, match=problem) as caught:
        read_file(url)
    assert str(caught.value).startswith(f"image {url!r} cannot be read")


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MOST_IMAGE_BYTES + 1)
    with pytest.raises(ImageError, match="is larger than 64 MiB"):
        read_file((tmp_path / "huge").as_uri())


@contextmanager
def https_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that serves `folder`, with a certificate that this process trusts; its URL."""
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run([*command.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=folder, check=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "cert.pem"))

    class Files(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def drip(self) -> None:
            """Send a byte now and then, without an end: as a header or as a body."""
            with suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX: " if "header" in self.path else b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.05)

        def do_GET(self) -> None:
            if "drip" in self.path and not self.path.startswith("/moved"):
                self.drip()
                return
            target = "http://localhost/a.png" if self.path == "/to-http" else self.path.removeprefix("/moved")
            if target != self.path:
                self.send_response(302)
                self.send_header("Location", target)
                self.end_headers()
            else:
                super().do_GET()

    server = http.server.ThreadingHTTPServer(("localhost", 0), Files)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"https://localhost:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_file_is_read_over_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(DATA)
    with https_server(tmp_path, monkeypatch) as url:
        assert read_image(ImageRef(f"{url}/a.png", digest_of_image(DATA))) == DATA
        assert read_file(f"{url}/moved/a.png") == DATA
        with pytest.raises(ImageError, match="404"):
            read_file(f"{url}/b.png")
        with pytest.raises(ImageError, match=r"redirects to 'http://localhost/a\.png', which is not https"):
            read_file(f"{url}/to-http")
        with pytest.raises(ImageError, match="sha256 is"):
            read_image(ImageRef(f"{url}/a.png", "0" * 64))
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(ImageError, match="certificate verify failed"):
            read_file(f"{url}/a.png")


@pytest.mark.parametrize("path", ["drip", "drip-header", "moved/drip"])
def test_a_server_that_sends_a_byte_now_and_then_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(images, "DOWNLOAD_S", 0.5)
    with https_server(tmp_path, monkeypatch) as url, pytest.raises(ImageError, match=r"it took longer than 0\.5 s"):
        read_file(f"{url}/{path}")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ImageError, match="is empty"):
        read_file((tmp_path / "empty").as_uri())
