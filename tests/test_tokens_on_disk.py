"""Text in chunks and its tokens on disk: as if all of it had been in memory."""

import hashlib
import io
import random
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ipslimit.experiments.settings import StudyError
from ipslimit.experiments.store import DamagedFile, digest
from ipslimit.experiments.text import source, tokens
from ipslimit.experiments.text.characters import Characters, CharacterWindows
from ipslimit.experiments.text.source import check_source, read_text, windows
from ipslimit.experiments.text.tokens import load_tokens, token_key, tokenize

in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def whole(part):
    return "".join(part.chunks())


@pytest.fixture
def small_chunks(monkeypatch):
    """So small that every text has many, cut anywhere."""
    monkeypatch.setattr(source, "CHUNK", 3)
    monkeypatch.setattr(source, "LONGEST_LINE", 8)


def by_hand(text):
    """Both parts of a file, from all of it: whole lines, of which the last tenth is held out."""
    lines = text.split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    ends = np.cumsum([len(line) for line in lines])
    cut = min(max(int((ends < 0.9 * ends[-1]).sum()), 1), len(lines) - 1)
    return "\n".join(lines[:cut]), "\n".join(lines[cut:])


pieces = st.text(st.sampled_from("ab é漢🙂\x85\u2028\n\r"), max_size=9)


@in_one_folder
@given(st.lists(pieces, max_size=9).map("\n".join), st.sampled_from(["\n", "\r\n", "\r"]))
@example("a\nb", "\n")
@example("\na", "\n")
@example("a\n\n", "\r\n")
@example("a" * 40 + "\n" + "b" * 5 + "\n" + "c" * 5 + "\n" + "d" * 3, "\n")
def test_a_file_is_split_as_if_it_were_in_memory(tmp_path, small_chunks, text, newline):
    file = tmp_path / "text.txt"
    with file.open("w", encoding="utf-8", newline="") as opened:
        opened.write(text.replace("\n", newline))
    text = text.replace("\n", newline).replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip() or text.count("\n") + (not text.endswith("\n")) < 2:
        with pytest.raises(StudyError, match=r"it is empty|at least two lines"):
            read_text(str(file))
        return
    found = read_text(str(file))
    assert (whole(found.train), whole(found.held_out)) == by_hand(text)
    for part in (found.train, found.held_out):
        assert part.sha256 == hashlib.sha256(whole(part).encode()).hexdigest()
        assert part.characters == len(whole(part))
        *chunks, _ = [*part.chunks(), ""]
        assert all(chunk.endswith("\n") or len(chunk) >= 8 for chunk in chunks[:-1])


def test_a_file_is_split_by_lines(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(f"line {i}" for i in range(100)), encoding="utf-8")
    text = read_text(str(file))
    assert text.source == "text.txt"
    assert f"{whole(text.train)}\n{whole(text.held_out)}" == file.read_text()
    assert 8 <= len(whole(text.held_out).splitlines()) <= 12


@pytest.mark.parametrize("suffix", ["tokens", "raw"])
def test_wikitext_brings_its_own_split(tmp_path, suffix):
    for part in ("train", "valid", "test"):
        (tmp_path / f"wiki.{part}.{suffix}").write_text(f" = {part} = \n", encoding="utf-8")
    check_source(str(tmp_path))
    text = read_text(str(tmp_path))
    assert (whole(text.train), whole(text.held_out)) == (" = train = \n", " = valid = \n")


def test_bad_data_is_named(tmp_path):
    with pytest.raises(ValueError, match="data must be 'wikipedia', a text file, or a folder"):
        check_source(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"folder with wiki\.train\.tokens and wiki\.valid"):
        check_source(str(tmp_path))
    (tmp_path / "latin").write_bytes("é\né".encode("latin-1"))
    with pytest.raises(StudyError, match="must be UTF-8 text; byte 0 is not"):
        read_text(str(tmp_path / "latin"))
    (tmp_path / "short").write_text("one line")
    with pytest.raises(StudyError, match="at least two lines"):
        read_text(str(tmp_path / "short"))
    (tmp_path / "zero").write_bytes(b"a\nb\0\n")
    with pytest.raises(StudyError, match="it has zero bytes"):
        read_text(str(tmp_path / "zero"))
    for content in (b"", b" \n\n\t"):
        (tmp_path / "blank").write_bytes(content)
        with pytest.raises(StudyError, match="it is empty"):
            read_text(str(tmp_path / "blank"))


@pytest.mark.parametrize("place", [0, 2, 3, 10, 100])
def test_the_byte_that_is_no_utf8_is_found_in_any_chunk(tmp_path, small_chunks, place):
    before = ("a" * (place % 3) + "漢" * (place // 3)).encode()
    assert len(before) == place
    for content in (b"\xff more\n", "漢".encode()[:2]):  # wrong, and cut short at the end
        (tmp_path / "file").write_bytes(before + content)
        with pytest.raises(StudyError, match=f"byte {place} is not"):
            read_text(str(tmp_path / "file"))


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("some lines\n" * 50)
    text = read_text(str(file))
    for content, said in ((b"some lines\n" * 40, "shorter"), (b"\xff" * 550, "any more")):
        file.write_bytes(content)
        with pytest.raises(StudyError, match=said):
            whole(text.train)
    file.unlink()
    with pytest.raises(StudyError, match=r"text\.txt cannot be read any more \(No such file"):
        whole(text.train)


def test_windows_follow_one_another():
    found = windows(np.arange(10), 3)
    assert found.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    for count in range(9):
        numbers = np.arange(count, dtype=np.int32)
        found = windows(numbers, 3)
        assert found.shape == (max(0, (count - 1) // 3), 4) and found.dtype == numbers.dtype
        assert not found.size or np.shares_memory(found, numbers)  # nothing is copied


def some_text(path, lines=300):
    path.write_text("".join(f"the {i} naïve 漢字 words\n" for i in range(lines)), encoding="utf-8")
    return read_text(str(path))


@pytest.mark.parametrize("on_disk", [False, True])
def test_tokens_are_kept_and_give_the_text_back(tmp_path, monkeypatch, on_disk):
    monkeypatch.setattr(tokens, "IN_MEMORY", 0 if on_disk else 2**20)
    tokenizers = pytest.importorskip("tokenizers")
    text = some_text(tmp_path / "text.txt")
    made = tokenize(text, 300, tmp_path)
    tokenizer = tokenizers.Tokenizer.from_str(made.tokenizer)
    assert tokenizer.decode(made.train) == whole(text.train)
    assert tokenizer.decode(made.held_out) == whole(text.held_out)
    assert made.train.dtype == np.int32 and isinstance(made.train, np.memmap) == on_disk
    assert np.shares_memory(windows(made.train, 8), made.train)
    with pytest.raises(ValueError, match="read-only"):
        made.train[0] = 0
    key = token_key(text, 300)
    shas = [hashlib.sha256(whole(p).encode()).hexdigest() for p in (text.train, text.held_out)]
    assert key == digest("tokens", *shas, 300)
    assert load_tokens(tmp_path, "another") is None
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"text.txt"} | {f"tokens-{key}.{n}" for n in ("train", "held_out", "tokenizer")}


def test_chunks_and_what_was_in_memory_before_give_the_same_tokens(tmp_path, small_chunks):
    tokenizers = pytest.importorskip("tokenizers")
    rng = random.Random(0)
    words = [
        rng.choice("abc") * rng.randint(1, 4) + rng.choice(["", "é", "漢", ","]) for _ in range(40)
    ]
    ends = ["\n", "\n", "\n\n", "\r\n", "\x85", "\u2028 "]
    lines = [" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(200)]
    file = tmp_path / "text.txt"
    file.write_bytes("".join(line + rng.choice(ends) for line in lines).encode())
    text = read_text(str(file))
    source.LONGEST_LINE = 2**24  # as it is
    made = tokenize(text, 280, tmp_path)
    naive = tokenizers.ByteLevelBPETokenizer()
    trained = whole(text.train).splitlines(keepends=True)
    naive.train_from_iterator(trained, vocab_size=280, show_progress=False)
    assert made.tokenizer == naive.to_str() and naive.get_vocab_size() == 280
    for part, found in ((text.train, made.train), (text.held_out, made.held_out)):
        encoded = naive.encode_batch(whole(part).splitlines(keepends=True))
        assert found.tolist() == [i for line in encoded for i in line.ids]


@pytest.mark.parametrize("on_disk", [False, True])
def test_tokens_that_cannot_be_trusted_are_made_again(tmp_path, monkeypatch, on_disk):
    monkeypatch.setattr(tokens, "IN_MEMORY", 0 if on_disk else 2**20)
    pytest.importorskip("tokenizers")
    text = some_text(tmp_path / "text.txt")
    made = tokenize(text, 300, tmp_path)
    first, key = made.train.tolist(), token_key(text, 300)
    for suffix in ("train", "held_out", "tokenizer"):
        path = tmp_path / f"tokens-{key}.{suffix}"
        good = path.read_bytes()
        for content in (good[:-4], good + good[:4], good[4:8] + good[4:], b""):
            path.unlink()  # it is still in use above
            path.write_bytes(content)
            with pytest.raises(DamagedFile, match=path.name):
                load_tokens(tmp_path, key)
            damaged = []
            again = tokenize(text, 300, tmp_path, damaged)
            assert again.train.tolist() == first and path.read_bytes() == good
            assert len(damaged) == 1 and path.name in damaged[0]
    path = tmp_path / f"tokens-{key}.train"
    path.unlink()
    with pytest.raises(DamagedFile, match="missing"):
        load_tokens(tmp_path, key)


def test_tokens_of_a_text_that_changed_are_not_kept(tmp_path):
    pytest.importorskip("tokenizers")
    file = tmp_path / "text.txt"
    text = some_text(file)
    key = token_key(text, 300)
    file.write_text(file.read_text().replace("naïve", "naive"))
    with pytest.raises(StudyError, match="must not change while it is read"):
        tokenize(text, 300, tmp_path)
    assert load_tokens(tmp_path, key) is None and [*tmp_path.iterdir()] == [file]


def test_a_part_without_a_token(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "text.txt").write_text("a\n\n")
    made = tokenize(read_text(str(tmp_path / "text.txt")), 300, tmp_path)
    assert len(made.train) == 1 and made.held_out.shape == (0,)


def test_characters_in_chunks_have_the_numbers_of_the_whole(tmp_path, small_chunks):
    file = tmp_path / "text.txt"
    file.write_text("".join(f"{i} naïve 漢字 words, {i % 7}\n" for i in range(40)))
    text = read_text(str(file))
    found = CharacterWindows.of(text, 15, 6, 1000, 1000)
    train, held_out = whole(text.train), whole(text.held_out)
    characters = Characters.of(train, 15)
    assert found.characters.listed == characters.listed
    assert found.counts == {"train": len(train), "held_out": len(held_out)}
    assert np.array_equal(found.train, windows(characters.encode(train), 6))
    assert np.array_equal(found.held_out, windows(characters.encode(held_out), 6))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_reading_shows_how_far_it_is_on_a_terminal_alone(tmp_path, monkeypatch, stream):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(source, "DELAY", 0.0)
    monkeypatch.setattr(sys, "stderr", stream())
    tokenize(some_text(tmp_path / "text.txt"), 300, tmp_path)
    said = sys.stderr.getvalue()
    for doing in ("reading text.txt", "words of text.txt", "tokens of text.txt"):
        assert (f"{doing}: " in said and "left" in said) == (stream is Terminal)
    assert stream is Terminal or not said
