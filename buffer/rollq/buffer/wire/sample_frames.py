"""Samples as one frame of bytes, and back."""

from rollq.buffer.wire.frame_decoding import decode_sample, decode_samples
from rollq.buffer.wire.frame_encoding import check_details, encode_in_pieces, encode_samples
from rollq.buffer.wire.frame_format import FRAME_VERSION, MAGIC, PREFIX

__all__ = [
    "FRAME_VERSION",
    "MAGIC",
    "PREFIX",
    "check_details",
    "decode_sample",
    "decode_samples",
    "encode_in_pieces",
    "encode_samples",
]
