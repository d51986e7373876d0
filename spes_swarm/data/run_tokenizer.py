"""The tokenizer of a run, as found on this machine."""

from __future__ import annotations

from spes_swarm.base.errors import ConfigError, ManifestError
from spes_swarm.config.run import RunConfig, frozen_embedding
from spes_swarm.data.tokenizer import Tokenizer, load_tokenizer


def run_tokenizer(run: RunConfig) -> Tokenizer:
    """Loads the tokenizer of a run, and checks that it fits the run and its model.

    Raises:
        DataError: the tokenizer cannot be loaded.
        ManifestError: it is not the founder's.
        ConfigError: the model's vocabulary is too small for it, or the model never trains one of its tokens.
    """
    tokenizer = load_tokenizer(run.tokenizer.name)
    if run.tokenizer.digest is not None and tokenizer.digest != run.tokenizer.digest:
        raise ManifestError(
            f"tokenizer {run.tokenizer.name!r} on this machine is not the one that the run uses "
            f"(digest {tokenizer.digest[:12]}, expected {run.tokenizer.digest[:12]})"
        )
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"tokenizer {run.tokenizer.name!r} has {tokenizer.vocab_size} tokens, but the model's vocabulary has only "
            f"{run.model.vocab_size}: raise run.model.settings.vocab_size or choose another tokenizer"
        )
    pad = run.model.pad_token_id
    if pad is not None and tokenizer.produces(pad):
        raise ConfigError(f"run.model.{frozen_embedding(pad, f'a token of tokenizer {run.tokenizer.name!r}')}")
    tokenizer.date = run.tokenizer.date
    return tokenizer
