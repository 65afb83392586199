"""`ipslimit report` on folders that hold anything: the page of what was written, or one line."""

import contextlib
import copy
import hashlib
import io
import json
import os
import shutil
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from ipslimit.experiments.cli import main
from ipslimit.experiments.studies.finding import FORM, Finding, Measured, Picture, Table, outcome
from ipslimit.experiments.studies.report import ReportCommand

in_one_folder = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def finding(sentence="The exponent is -0.5123."):
    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([1, 2])
    rows = [{"L": 4, "error": 0.2157}, {"L": 8, "error": None}]
    return Finding(
        "rates",
        "Rates",
        "how",
        "at most -1/3",
        sentence,
        [Measured("x in L", "-1/2", -0.5123, (-0.53, -0.49))],
        [Table("exponents", "All", rows)],
        [Picture("exponents", figure, "a caption"), Picture("collapse", figure, "another")],
        {"more": 1.5},
        {"seeds": 4, "setting": {"d": 3}},
        ["a note"],
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    outcome(finding(), "cpu").write(folder)
    return folder


@pytest.fixture
def folder(written, tmp_path):
    shutil.copytree(written, tmp_path / "rates")
    return tmp_path / "rates"


def report(*folders, out):
    """(status, what is said, the page or None)."""
    page = out / "report.html"
    page.unlink(missing_ok=True)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(["report", *map(str, folders), "--out", str(page)])
        except SystemExit as stopped:
            return stopped.code, said.getvalue(), page.read_text() if page.exists() else None
    return 0, said.getvalue(), page.read_text(encoding="utf-8")


def expect_refusal(folder, out, words=""):
    assert_refused(report(folder, out=out), folder, words)


def assert_refused(answer, folder, words=""):
    status, said, page = answer
    assert (status, page) == (2, None), said
    assert said.startswith("ipslimit: folders must hold finished studies; ")
    assert said.count("\n") == 1 and "Traceback" not in said and len(said) < 1000, said
    assert str(folder) in said and words in said, said
    assert "un the study again" in said or "un `ipslimit study NAME" in said


def refit(folder):
    """Checksums that fit what is there."""
    sums = "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix != ".sha256"
    )
    (folder / "finding.sha256").write_text(sums)


def rewrite(folder, content):
    """Another finding.json behind checksums that fit."""
    text = content if isinstance(content, (bytes, str)) else json.dumps(content)
    path = folder / "finding.json"
    path.write_bytes(text) if isinstance(text, bytes) else path.write_text(text)
    refit(folder)


def content(folder):
    return json.loads((folder / "finding.json").read_text())


def test_what_was_written_is_shown(folder, tmp_path):
    status, said, page = report(folder, folder, out=tmp_path)
    assert (status, said) == (0, "")
    for word in ("The exponent is -0.5123.", "0.2157", "a caption", "another", "a note"):
        assert page.count(word) >= 2, word
    assert page.count("data:image/png;base64,") == 4


@pytest.mark.parametrize(
    "name", ["finding.json", "exponents.csv", "exponents.png", "exponents.pdf"]
)
@pytest.mark.parametrize("damage", ["a digit", "cut", "empty", "absent", "folder", "another's"])
def test_a_file_that_is_not_what_was_written_is_told(folder, tmp_path, name, damage):
    path = folder / name
    good = path.read_bytes()
    if damage == "a digit":
        at = next(i for i in range(len(good) // 2, len(good)) if good[i : i + 1].isdigit())
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    elif damage in ("cut", "empty"):
        path.write_bytes(good[: len(good) // 2] if damage == "cut" else b"")
    else:
        path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "another's":
        outcome(finding("The exponent is -0.3333."), "cpu").write(tmp_path / "rates")
        other = (folder / name).read_bytes()
        path.write_bytes(good if name == "finding.json" else other + b"\n")
    expect_refusal(folder, tmp_path, name)


def test_new_figures_beside_old_numbers_are_told(folder, tmp_path):
    """As an older version left them when it was killed."""
    old = (folder / "finding.json").read_bytes()
    outcome(finding("The exponent is -0.3333."), "cpu").write(folder)
    (folder / "finding.json").write_bytes(old)
    expect_refusal(folder, tmp_path, "finding.json is missing, or is not what finding.sha256")


@pytest.mark.parametrize("left", ["no checksums", "nothing", "no folder", "a file"])
def test_what_is_no_finished_study_is_told(folder, tmp_path, left):
    words = "has no finding.json. Run `ipslimit study NAME --out"
    if left == "no checksums":
        (folder / "finding.sha256").unlink()
        words = "finding.sha256 is missing, as after a run that was killed"
    else:
        shutil.rmtree(folder)
    if left == "nothing":
        folder.mkdir()
    elif left == "a file":
        folder.touch()
    expect_refusal(folder, tmp_path, words)


def changed(**parts):
    return lambda finding: finding | parts


def without(name):
    return lambda finding: {key: value for key, value in finding.items() if key != name}


def picture(file):
    return lambda finding: finding | {"pictures": [{"file": file, "caption": "c"}]}


FORMS = {
    **{f"no {name}": without(name) for name in FORM},
    **{f"{name} is a number": changed(**{name: 5}) for name in FORM},
    "a list": lambda finding: [finding],
    "null": lambda finding: None,
    "a text": lambda finding: "finding",
    "notes of numbers": changed(notes=[1]),
    "columns of lists": changed(tables=[{"title": "t", "columns": [[]], "rows": []}]),
    "rows of lists": changed(tables=[{"title": "t", "columns": ["L"], "rows": [[1]]}]),
    "rows that are none": changed(tables=[{"title": "t", "columns": ["L"], "rows": None}]),
    "measured nothing": changed(measured=[None]),
    "measured without text": changed(measured=[{"what": "w", "theory": "t", "kind": "k"}]),
    "pictures are texts": changed(pictures=["exponents.png"]),
    "a picture without caption": changed(pictures=[{"file": "exponents.png"}]),
    "a picture that is a number": picture(1),
    "a picture that is not there": picture("absent.png"),
    "a picture by absolute path": picture("/etc/passwd"),
    "a picture above": picture("../secret.png"),
    "a picture below": picture("sub/secret.png"),
    "a picture with detours": picture("./exponents.png"),
    "a picture that is the folder": picture("."),
    "a picture without a name": picture(""),
    "a picture with a null": picture("exponents.png\0"),
    "a picture that is none": picture("finding.json"),
    "deep": changed(settings={"a": json.loads("[" * 40 + "]" * 40)}),
    "lone surrogates": changed(sentence="\ud800"),
    "NaN": changed(settings={"a": float("nan")}),
    "infinity": changed(numbers={"a": float("-inf")}),
}


@pytest.mark.parametrize("form", FORMS)
def test_another_form_is_told_though_its_checksum_fits(folder, tmp_path, form):
    png = (folder / "exponents.png").read_bytes()
    (tmp_path / "secret.png").write_bytes(png)
    (folder / "sub").mkdir()
    (folder / "sub" / "secret.png").write_bytes(png)
    rewrite(folder, FORMS[form](content(folder)))
    expect_refusal(folder, tmp_path)


TEXTS = {
    "empty": b"",
    "no JSON": b"finding",
    "half": b'{"study": "rates"',
    "two": b"{} {}",
    "binary": bytes(range(256)),
    "UTF-16": '{"study": "rates"}'.encode("utf-16"),
    "Latin-1": b'{"study": "\xe9"}',
    "very deep": b"[" * 100_000,
    "null bytes": b"\0" * 1000,
    "a long number": b"9" * 10_000,
    "1e400": b'{"study": 1e400}',
    "a name twice": b'{"a":1,"a":2}',
}


@pytest.mark.parametrize("kind", TEXTS)
def test_what_is_no_json_is_told_though_its_checksum_fits(folder, tmp_path, kind):
    rewrite(folder, TEXTS[kind])
    expect_refusal(folder, tmp_path)


def test_a_huge_file_is_not_read(folder, tmp_path):
    os.truncate(folder / "finding.json", 2**40)
    expect_refusal(folder, tmp_path, "finding.json")


@pytest.mark.parametrize("fitting", [False, True])
def test_a_picture_that_leads_out_is_not_shown(folder, tmp_path, fitting):
    secret = tmp_path / "secret.png"
    secret.write_bytes((folder / "collapse.png").read_bytes())
    (folder / "exponents.png").unlink()
    (folder / "exponents.png").symlink_to(secret)
    if fitting:
        refit(folder)
    expect_refusal(folder, tmp_path, "exponents.png")


def test_what_changes_after_it_was_checked_is_told(folder, tmp_path, monkeypatch, capsys):
    check = ReportCommand.check

    def then_damaged(command):
        check(command)
        (folder / "exponents.png").write_bytes(b"")

    monkeypatch.setattr(ReportCommand, "check", then_damaged)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(folder), "--out", str(tmp_path / "report.html")])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1 and "exponents.png" in said
    assert not (tmp_path / "report.html").exists()


@in_one_folder
@given(st.data())
def test_a_generated_change_is_told_or_changes_nothing(written, tmp_path, data):
    folder, untouched = tmp_path / "rates", tmp_path / "untouched.html"
    if not folder.exists():
        shutil.copytree(written, folder)
        untouched.write_text(report(folder, out=tmp_path)[2])
    path = folder / data.draw(
        st.sampled_from(sorted(p.name for p in written.iterdir() if p.is_file()))
    )
    good = path.read_bytes()
    at = data.draw(st.integers(0, 10**6)) % len(good)
    noise = data.draw(st.binary(max_size=20))
    changed = data.draw(
        st.sampled_from(
            (
                good[:at],
                good[:at] + noise + good[at:],
                good[:at] + noise,
                noise,
                good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :],
                good,
            )
        )
    )
    path.write_bytes(changed)
    try:
        answer = report(folder, out=tmp_path)
        if changed == good or (path.suffix == ".sha256" and not answer[0]):  # a line's end, say
            assert answer == (0, "", untouched.read_text())
        else:
            assert_refused(answer, folder)
    finally:
        path.write_bytes(good)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["file", "caption", "title", "rows", "x"]), inner)
    ),
    max_leaves=6,
)


def places(value, place=()):
    """Every place in JSON."""
    yield place
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(part, (*place, key))


class Page(HTMLParser):
    """Elements that are open, and addresses that are asked for."""

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.tags = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@in_one_folder
@given(st.data())
def test_any_json_gives_a_whole_page_or_one_line(written, tmp_path, data):
    folder = tmp_path / "rates"
    if not folder.exists():
        shutil.copytree(written, folder)
    value = copy.deepcopy(content(written))
    place = data.draw(st.sampled_from(list(places(value))))
    other = data.draw(json_values)
    if place:
        inner = value
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = other
    rewrite(folder, value if place else other)
    answer = report(folder, out=tmp_path)
    if answer[0]:
        assert_refused(answer, folder)
    else:
        assert Page(answer[2]).open == []


def test_text_is_text(folder, tmp_path):
    """HTML in any text of a finding is shown, not followed."""
    attack = '"><script src="http://x/y.js"></script><img src=x onerror=alert(1)>\'&'

    def spoilt(value):
        if isinstance(value, dict):
            return {attack if k == "d" else k: spoilt(v) for k, v in value.items()}
        return (
            [spoilt(v) for v in value]
            if isinstance(value, list)
            else (attack if isinstance(value, str) else value)
        )

    finding = content(folder)
    rewrite(folder, spoilt(finding) | {"pictures": finding["pictures"]})
    status, _, text = report(folder, folder, out=tmp_path)
    page = Page(text)
    assert status == 0 and page.open == [] and "script" not in page.tags
    assert all(a.startswith(("#", "data:image/png;base64,")) for a in page.addresses)
    assert len({a for a in page.addresses if a.startswith("#")}) == 2  # a study twice
