"""A text as numbers: its alphabet, the part that nobody trains on, and each agent's own part of the rest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

import shoal

LARGEST_ALPHABET = 512
"""A file with more characters than that, or of none at all (not UTF-8), is read as bytes."""
HELD_OUT = 10
"""One in so many characters, at the end, is for the test."""
HELP = "the language reference that Python's help() shows (pydoc_data.topics)"


@dataclass(frozen=True)
class Text:
    """A text and how it is written.

    Attributes:
        name: Where it comes from.
        unit: ``"character"`` or ``"byte"``.
        alphabet: What the numbers stand for.
        train, test: The text as numbers, int64 [length]: what is trained on, and what comes after it.
    """

    name: str
    unit: str
    alphabet: list[str] | list[bytes]
    train: Tensor
    test: Tensor

    def shard(self, rank: int, agents: int) -> Tensor:
        """One agent's own part of what is trained on, as long as all others: [length // agents]."""
        length = len(self.train) // agents
        return self.train[rank * length : (rank + 1) * length]

    def decode(self, numbers: Tensor) -> str:
        if self.unit == "character":
            return "".join(str(self.alphabet[number]) for number in numbers.tolist())
        return bytes(numbers.tolist()).decode(errors="replace")


def load(path: str, context: int) -> Text:
    """The text of a file; of none, what ``help()`` knows of the Python language, which Python brings along.

    Args:
        path: The file, or "".
        context: What a model reads at a time; each agent's part and the test must be longer.

    Raises:
        SystemExit: It cannot be read, or it is too short for so many agents.
    """
    try:
        content = Path(path).read_bytes() if path else "\n".join(topics[key] for key in sorted(topics)).encode()
    except OSError as error:
        raise SystemExit(f"cannot read {path}: {error.strerror}") from None
    text = _written(path or HELP, content)
    shortest = min(len(text.test), len(text.train) // shoal.size())
    if shortest <= context:
        raise SystemExit(
            f"{text.name} has {len(text.train) + len(text.test)} {text.unit}s, of which {shortest} are for one of "
            f"{shoal.size()} agents or for the test; a model that reads {context} at a time needs {context + 1} or more"
        )
    return text


def _written(name: str, content: bytes) -> Text:
    try:
        characters = content.decode()
        alphabet = sorted(set(characters))
    except UnicodeDecodeError:
        alphabet = []
    if 0 < len(alphabet) <= LARGEST_ALPHABET:
        number_of = {character: number for number, character in enumerate(alphabet)}
        numbers = torch.tensor([number_of[character] for character in characters])
        return _split(name, "character", alphabet, numbers)
    return _split(name, "byte", [bytes([byte]) for byte in range(256)], torch.tensor(list(content), dtype=torch.int64))


def _split(name: str, unit: str, alphabet: list[str] | list[bytes], numbers: Tensor) -> Text:
    at = len(numbers) - len(numbers) // HELD_OUT
    return Text(name, unit, alphabet, numbers[:at], numbers[at:])


def windows(text: Tensor, count: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random places of a text: what is read there, and at each place what comes next, both int64 [count, context]."""
    starts = torch.randint(len(text) - context, (count, 1), generator=generator)
    read = starts + torch.arange(context)
    return text[read], text[read + 1]


def tiles(text: Tensor, context: int, most: int) -> tuple[Tensor, Tensor]:
    """The same for the first places one after another, at most `most` of them: [places, context]."""
    count = min(most, (len(text) - 1) // context)
    length = count * context
    return text[:length].view(count, context), text[1 : length + 1].view(count, context)
