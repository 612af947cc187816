"""API keys and the file that holds them, and where a daemon may listen."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from protos.access import key_file
from protos.access.bearer import API_KEY_VARIABLE, bearer
from protos.access.key_file import KeyFile
from protos.access.listening import check_listening, is_loopback
from protos.access.roles import KEY_CHARS_MIN, PURPOSE, ROLES, new_line, parse_keys
from protos.errors import InvalidRequest

KEY, OTHER = "k" * KEY_CHARS_MIN, "o" * KEY_CHARS_MIN


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def stood(path: Path) -> None:
    """As if the file had been as it is for long."""
    os.utime(path, (1.0, 1.0))


# -- lines


def test_lines_have_a_role_a_name_and_a_key() -> None:
    text = f"# of the fleet\n\nadmin me {KEY}\n  agent\trunner-1  {OTHER}   # its second key\n"
    keys = parse_keys(text, "f")
    assert [(key.role, key.name) for key in (keys.find(KEY), keys.find(OTHER)) if key] == [
        ("admin", "me"),
        ("agent", "runner-1"),
    ]
    assert keys.by_role() == {"admin": 1, "agent": 1}
    assert all(keys.find(text) is None for text in ("", KEY[:-1], KEY + "k", KEY.upper(), "\udcff" * 20))


def test_a_role_and_a_name_may_have_several_keys() -> None:
    keys = parse_keys(f"agent a {KEY}\nagent a {OTHER}\n", "f")
    assert keys.find(KEY) is not None
    assert keys.find(OTHER) is not None


WRONG = {
    "": "has no key",
    "# nothing\n": "has no key",
    f"admin {KEY}": "line 1 has 2 words",
    f"admin me {KEY} more": "line 1 has 4 words",
    f"admin me {KEY}\n{OTHER} admin me": "line 2 begins with no role",
    f"Admin me {KEY}": "begins with no role",
    f"admin ../me {KEY}": "no name in its second place",
    f"admin {'n' * 65} {KEY}": "no name in its second place",
    f"admin me {KEY[1:]}": "no key in its third place",
    f"admin me {'k' * 513}": "no key in its third place",
    f"admin me {KEY}é": "no key in its third place",
    f"admin me sk-session-{KEY}": "begins as those of sessions do",
    f"admin me sk-finish-{KEY}": "begins as those of sessions do",
    f"admin me {KEY}\n\nreader you {KEY}": "line 3 has the key of line 1 again",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_line_is_named_by_its_number_and_never_quoted(text: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_keys(text, "the file")
    assert WRONG[text] in str(error.value)
    assert "the file" in str(error.value)
    assert not [word for word in text.split() if len(word) >= KEY_CHARS_MIN and word in str(error.value)]


def test_keys_are_not_shown() -> None:
    keys = parse_keys(f"admin me {KEY}", "f")
    assert KEY not in repr(keys)
    assert "digest" not in repr(keys.find(KEY))


def test_a_new_line_is_one_of_the_file() -> None:
    for role in ROLES:
        line, again = new_line(role, "me"), new_line(role, "me")
        assert line != again
        assert (found := parse_keys(line, "f").find(line.split()[2])) is not None
        assert (found.role, found.name) == (role, "me")
        assert PURPOSE[role]
    with pytest.raises(InvalidRequest, match="cannot name the holder"):
        new_line("agent", "a b")


# -- the file


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644, 0o620, 0o666, 0o777])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "keys", f"admin me {KEY}", mode)
    with pytest.raises(InvalidRequest, match=rf"has the mode {mode:04o}: others may .*\(chmod 600 {path}\)"):
        KeyFile(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_its_owner_and_group_may_read_it(tmp_path: Path, mode: int) -> None:
    assert len(KeyFile(write(tmp_path / "keys", f"admin me {KEY}", mode))) == 1


def test_what_is_no_file_of_keys_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "bytes").write_bytes(b"admin me \xff")
    (tmp_path / "bytes").chmod(0o600)
    for name, why in {
        "absent": "No such file",
        "pipe": "is no file",
        "bytes": "is no text",
        ".": "is no file",
    }.items():
        with pytest.raises(InvalidRequest, match=why):
            KeyFile(tmp_path / name)
    large = write(tmp_path / "large", "#" * (key_file.BYTES_MAX + 1))
    with pytest.raises(InvalidRequest, match="is larger than 8 MiB"):
        KeyFile(large)


def test_a_directory_in_its_place_costs_no_descriptor(tmp_path: Path) -> None:
    """A daemon looks every second, for as long as it stays there."""
    own = Path("/proc/self/fd")
    before = len(list(own.iterdir()))
    for _ in range(10):
        with pytest.raises(InvalidRequest, match="is no file"):
            KeyFile(tmp_path)
    assert len(list(own.iterdir())) == before


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", f"agent a {KEY}")
    keys = KeyFile(path)
    for text in (f"agent a {KEY}\nagent a {OTHER}", f"agent a {OTHER}"):
        write(path, text)
        keys.refresh()
        assert keys.find(OTHER) is not None
    assert keys.find(KEY) is None, "a key whose line is gone is not valid any more"
    replaced = write(tmp_path / "next", f"admin me {KEY}")
    replaced.replace(path)
    keys.refresh()
    assert keys.by_role() == {"admin": 1}


def test_two_changes_within_one_tick_of_the_clock_are_both_seen(tmp_path: Path) -> None:
    """The second leaves size, times and inode as they are."""
    path = write(tmp_path / "keys", f"agent a {KEY}")
    keys = KeyFile(path)
    status = path.stat()
    path.write_text(f"agent a {OTHER}")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    keys.refresh()
    assert (keys.find(KEY), keys.find(OTHER) is not None) == (None, True)


def test_a_file_that_stays_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "keys", f"agent a {KEY}")
    monkeypatch.setattr("protos.access.secret_file.SETTLED_S", -1.0)
    keys = KeyFile(path)
    monkeypatch.setattr(key_file, "parse_keys", lambda *_: pytest.fail("it is read again"))
    keys.refresh()
    assert keys.find(KEY) is not None


@pytest.mark.parametrize("broken", ["admin", f"agent a {KEY} x", "", "mode", "gone", "directory"])
def test_a_file_that_breaks_leaves_the_keys_and_says_why_until_it_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    path = write(tmp_path / "keys", f"agent a {KEY}")
    keys = KeyFile(path)
    if broken == "mode":
        path.chmod(0o644)
    elif broken in ("gone", "directory"):
        path.unlink()
        if broken == "directory":
            path.mkdir()
    else:
        write(path, broken)
    for _ in range(3):
        keys.refresh()
        assert keys.find(KEY) is not None
        assert str(path) in keys.failure
    said = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 1, "once"
    assert KEY not in caplog.text
    if broken == "directory":
        path.rmdir()
    write(path, f"agent a {OTHER}")
    keys.refresh()
    assert (keys.failure, keys.find(KEY)) == ("", None)
    assert keys.find(OTHER) is not None


# -- where a daemon listens


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "::1", "[::1]", "localhost", "LOCALHOST"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    check_listening("a daemon", host, insecure=False, mend="x")


ELSEWHERE = ("0.0.0.0", "::", "", "10.0.0.1", "192.0.2.1", "fe80::1", "trainer-0", "localhost.example", "127.1", "1")


@pytest.mark.parametrize("host", ELSEWHERE)
def test_elsewhere_somebody_has_to_decide_who_may_use_it(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(InvalidRequest, match=r"would serve whoever reaches it, without credentials \(mend it so\)"):
        check_listening("a daemon", host, insecure=False, mend="mend it so")
    check_listening("a daemon", host, insecure=True, mend="x")
    check_listening("a daemon", host, insecure=False, has_keys=True, mend="x")


# -- clients


def test_a_client_sends_the_key_it_is_given_or_that_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert bearer() == {}
    assert bearer(KEY) == {"Authorization": f"Bearer {KEY}"}
    monkeypatch.setenv(API_KEY_VARIABLE, f"{OTHER}\n")
    assert bearer() == {"Authorization": f"Bearer {OTHER}"}
    assert bearer(KEY) == {"Authorization": f"Bearer {KEY}"}
    assert bearer("") == {}
    for odd in ("two words", "é" * 20, "a\nb"):
        with pytest.raises(InvalidRequest, match="the API key has spaces") as error:
            bearer(odd)
        assert odd not in str(error.value)
