"""A tokenizer with a chat template, as models that were trained on chats have one."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from spes_swarm.data.tokenizer import train_bpe

# The form of ChatML: every message ends in a mark of its own.
APPENDING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Writes a note before the newest answer only, as templates of reasoning models do with thoughts.
REWRITING = APPENDING.replace(
    "{{ message['content'] }}",
    "{% if loop.last and message['role'] == 'assistant' %}[new]{% endif %}{{ message['content'] }}",
)


def save_chat_tokenizer(directory: Path, template: str | None = APPENDING) -> Path:
    """Saves a tokenizer of 262 ids: bytes, pairs, the end of text and the two marks of the template."""
    train_bpe(["what is the colour of the sky? the sky is blue. " * 9], 260).save(directory)
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(directory / "tokenizer.json"))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory
