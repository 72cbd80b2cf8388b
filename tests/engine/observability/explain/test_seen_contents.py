"""SeenContents: the fields that differ, for whose they are, bounded and kept over a restart."""

from pathlib import Path

from kvtier.engine.observability.explain.seen_contents import NUM_CONTENTS, NUM_WAYS, SeenContents, Way

KEY = bytes(16)
PLAIN = Way(b"", "", "one", None)


def seen() -> SeenContents:
    found = SeenContents(KEY)
    found.add_namespace("one", {"dtype": "bfloat16", "block_size": "16"})
    found.add_namespace("two", {"dtype": "float16", "block_size": "16"})
    return found


def test_each_field_that_differs_is_named() -> None:
    contents = seen()
    contents.add(b"a", PLAIN)
    now = contents.num_added

    assert contents.differing(b"a", PLAIN, now) == []
    assert contents.differing(b"a", PLAIN._replace(salt=b"x"), now) == ["cache_salt"]
    assert contents.differing(b"a", PLAIN._replace(adapter="legal", salt=b"x"), now) == ["cache_salt", "adapter"]
    assert contents.differing(b"a", PLAIN._replace(namespace="two"), now) == ["namespace: dtype"]
    assert contents.differing(b"b", PLAIN._replace(salt=b"x"), now) == []


def test_of_several_ways_the_one_most_alike_counts() -> None:
    contents = seen()
    contents.add(b"a", Way(b"", "legal", "two", None))
    contents.add(b"a", PLAIN._replace(adapter="legal"))
    contents.add(b"a", Way(b"", "other", "two", None))

    assert contents.differing(b"a", PLAIN, contents.num_added) == ["adapter"]


def test_another_tenants_are_never_told_of() -> None:
    contents = seen()
    contents.add(b"a", PLAIN._replace(tenant="ann", salt=b"x"))

    assert contents.differing(b"a", PLAIN._replace(tenant="bob", salt=b"y"), contents.num_added) == []
    assert contents.differing(b"a", PLAIN._replace(tenant="ann", salt=b"y"), contents.num_added) == ["cache_salt"]


def test_without_keys_nothing_is_told_of_requests_with_another_salt() -> None:
    contents = seen()
    contents.add(b"a", PLAIN._replace(salt=b"victim", adapter="legal"))

    for guess in (PLAIN, PLAIN._replace(salt=b"guess"), PLAIN._replace(adapter="other")):
        assert contents.differing(b"a", guess, contents.num_added) == []
    own = PLAIN._replace(salt=b"victim")
    assert contents.differing(b"a", own, contents.num_added) == ["adapter"]


def test_what_was_seen_later_did_not_matter_then() -> None:
    contents = seen()
    before = contents.num_added
    contents.add(b"a", PLAIN)

    assert contents.differing(b"a", PLAIN._replace(salt=b"x"), before) == []


def test_it_is_bounded() -> None:
    contents = seen()
    for number in range(NUM_CONTENTS + 10):
        contents.add(number.to_bytes(8, "little"), PLAIN)
    for number in range(NUM_WAYS + 1):
        contents.add(b"a", PLAIN._replace(salt=bytes([number])))
    now = contents.num_added

    salted = PLAIN._replace(salt=b"else")
    assert contents.differing((0).to_bytes(8, "little"), salted, now) == []
    assert contents.differing((NUM_CONTENTS).to_bytes(8, "little"), salted, now) == ["cache_salt"]


def test_the_next_process_knows_what_was_seen(tmp_path: Path) -> None:
    contents = seen()
    contents.add(b"a", PLAIN)
    contents.save(tmp_path / "seen")

    loaded = SeenContents.load(tmp_path / "seen", bytes(range(16)))

    assert loaded.key == KEY
    assert loaded.differing(b"a", PLAIN._replace(namespace="two"), loaded.num_added) == ["namespace: dtype"]
    assert (tmp_path / "seen").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_none_is_as_no_file(tmp_path: Path) -> None:
    (tmp_path / "seen").write_bytes(b"\xff garbage")

    assert SeenContents.load(tmp_path / "seen", KEY).key == KEY
    assert SeenContents.load(tmp_path / "none", KEY).key == KEY
