"""The chain that leads to a version published as a delta: a complete copy, and the deltas from there on, in order.

Invariant: such a version's URI holds the SHA-256 of its chain, and the chain holds every delta's SHA-256, so a worker
applies exactly the bytes that the trainer stored.
"""

import hashlib
import re
from typing import Annotated, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.delta import Sha256

MAX_DELTAS = 100
_URI = re.compile(r"delta:([0-9a-f]{64})")


class Link(BaseModel):
    """One delta: its URI, size and SHA-256, and the digests of the versions that it leads from and to."""

    uri: str
    bytes: Annotated[int, Field(gt=0)]
    sha256: Sha256
    base: Sha256
    result: Sha256


class Chain(BaseModel):
    """The URI and digest of a complete copy, and the deltas that follow it."""

    complete: str
    digest: Sha256
    deltas: list[Link] = Field(default=[], max_length=MAX_DELTAS)

    @model_validator(mode="after")
    def _each_delta_continues_the_one_before(self) -> Self:
        if self.versions[:-1] != [link.base for link in self.deltas]:
            raise ValueError("a delta does not continue the previous delta")
        return self

    @property
    def versions(self) -> list[str]:
        """The digests of all versions that the chain leads through, from the complete copy on."""
        return [self.digest, *(link.result for link in self.deltas)]

    @property
    def uris(self) -> set[str]:
        """The URIs of everything that a worker without any version needs."""
        return {self.complete, *(link.uri for link in self.deltas)}

    def extended(self, link: Link) -> "Chain":
        """The chain with one more delta."""
        return Chain(complete=self.complete, digest=self.digest, deltas=[*self.deltas, link])

    def encode(self) -> bytes:
        """JSON that `decode` reads."""
        return self.model_dump_json().encode()

    @property
    def uri(self) -> str:
        """The URI of the version that the chain leads to."""
        return f"delta:{hashlib.sha256(self.encode()).hexdigest()}"

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Decode a chain that `encode` wrote. Raises `WeightsError` for anything else."""
        try:
            return cls.model_validate_json(raw)
        except ValidationError as error:
            raise WeightsError(f"the chain of deltas of weights cannot be read: {raw!r:.200}") from error


def is_chain(uri: str) -> bool:
    """Whether weights at this URI were published as a delta."""
    return _URI.fullmatch(uri) is not None
