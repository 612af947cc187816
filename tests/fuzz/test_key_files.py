"""Key files, whatever is in them: keys, or an error that names the line and no word of it."""

from __future__ import annotations

from pathlib import Path

from protos.access.key_file import KeyFile
from protos.access.roles import KEY_CHARS_MAX, KEY_CHARS_MIN, KEYS_MAX, ROLES, parse_keys
from protos.errors import InvalidRequest
from tests.fuzz.cases import EXAMPLES, cases

SECRET = "kkkkkkkk"
"""In every key of the corpus, and in no message of ours."""


def refusal(text: str) -> str:
    """Why the text holds no keys; "" if it does, and they are what they have to be."""
    try:
        keys = parse_keys(text, "file")
    except InvalidRequest as error:
        return str(error)
    assert 0 < len(keys) <= KEYS_MAX
    assert set(keys.by_role()) <= set(ROLES)
    for word in text.split():
        if keys.find(word) is not None:
            assert KEY_CHARS_MIN <= len(word) <= KEY_CHARS_MAX
            assert not word.startswith(("sk-session-", "sk-finish-"))
    return ""


def test_any_text_is_keys_or_an_error_without_a_key() -> None:
    found = []
    for case in cases("key_files", EXAMPLES * 200):
        try:
            found.append(refusal(case.data.decode(errors="replace")))
        except Exception as error:
            raise AssertionError(f"{case}: {error!r}") from error
        assert SECRET not in found[-1], case
    assert {""} < set(found), "some are keys, some are not"


def test_a_file_that_is_broken_leaves_the_keys_before_it(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(f"admin me {SECRET * 3}\n")
    keys = KeyFile(path)
    for case in cases("key_files", EXAMPLES * 20):
        before = len(keys)
        path.write_bytes(case.data)
        keys.refresh()
        assert len(keys) > 0, case
        assert len(keys) == before or not keys.failure, case
        assert SECRET not in keys.failure, case
