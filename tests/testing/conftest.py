"""Text for virtual peers: large enough for their batches, small enough to tokenise at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spes_swarm.data.corpus import open_corpus
from spes_swarm.data.sampler import TokenStream
from spes_swarm.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{number} times {number} is {number * number}.\n" for number in range(4000)))
    return path


@pytest.fixture(scope="module")
def stream(text: Path) -> TokenStream:
    torch.set_num_threads(1)
    return TokenStream(open_corpus(str(text), load_tokenizer("bytes"), text.parent / "cache"))
