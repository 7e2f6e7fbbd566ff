"""The names that byte-level tokenizers give to tokens: one printable character for each byte."""

from __future__ import annotations

END_OF_TEXT = "<|endoftext|>"

# A printable byte is its own character; others get the characters from 256 on, in order. Source: GPT-2, encoder.py:
# bytes_to_unicode.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}
BYTES = {character: byte for byte, character in CHARACTERS.items()}


def decoded(token: str) -> bytes:
    """Return the bytes that a token stands for. Errors   KeyError for a name with another character"""
    return bytes(BYTES[character] for character in token)


def named(token: bytes) -> str:
    """Return the name of a token."""
    return "".join(CHARACTERS[byte] for byte in token)
