"""Mistral's own chat templates, as the package mistral-common generates them for each version of its tokenizers.

Run with a version's name, in an interpreter that has the package, it prints the template.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).with_name("mistral.lock")
VERSIONS = ("v3", "v11", "v13")
"""v3 writes a list of calls, v11 a name and an identifier, v13 a name; only v13's models reason."""


@functools.cache
def template(version: str) -> str:
    """RuntimeError: the package cannot be installed."""
    from tests.support import side_package  # not in the interpreter that generates

    environment = {**os.environ, "PYTHONPATH": str(side_package.installed(LOCK))}
    done = subprocess.run(
        [sys.executable, __file__, version], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout


def generated(version: str) -> str:
    from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    return generate_chat_template(
        spm=version == "v3",
        tokenizer_version=TokenizerVersion(version),
        image_support=False,
        audio_support=False,
        thinking_support=version == "v13",
        default_system_prompt=None,
        plain_thinking_support=False,
        use_special_token_variables=True,
        model_settings_fields=None,
        reasoning_effort_values=None,
        reasoning_effort_default=None,
    )


if __name__ == "__main__":
    sys.stdout.write(generated(sys.argv[1]))
